"""Mutations of documents: of what a file says, field by field, and of its bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import yaml

Path_ = tuple[Any, ...]
_HUGE = 10**320
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    1000,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63) - 1,
    _HUGE,
    -_HUGE,
    0.0,
    -0.0,
    0.5,
    -1.5,
    1e-300,
    5e-324,
    1e18,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "x",
    "nan",
    "1e300",
    "9" * 320,
    "100 Gbit/s",
    "${oc.env:HOME}",
    "\x00",
    "\ud800",
    "\U0001f600",
    "a\nb",
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    ["x"],
    [1, 2],
    [float("nan")],
    {"x": 1},
    {"kind": "x"},
    {"": None},
    {"format": "autosync-plan/99"},
)
_NAMES = ("", "x", "format", "kind", "name", "__class__", "_target_", "self", "\ud800", "a b", "0", "-1", "[" * 50)


def mutate(random: Random, data: Any) -> Any:
    """A copy of plain data of which one to three places are changed; text that holds JSON is changed within, too."""
    made = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        made = _change(random, made)
    return made


def _change(random: Random, data: Any) -> Any:
    places = list(_places(data, ()))
    place = random.choice(places)
    found = _at(data, place)
    within = _parsed(found)
    if within is not None and random.random() < 0.8:
        return _put(data, place, _dumped(mutate(random, within)))
    return random.choice(_CHANGES)(random, data, place)


def _replace(random: Random, data: Any, place: Path_) -> Any:
    return _put(data, place, copy.deepcopy(random.choice(_VALUES)))


def _scale(random: Random, data: Any, place: Path_) -> Any:
    found = _at(data, place)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return _replace(random, data, place)
    if isinstance(found, int):
        return _put(data, place, found * random.choice((-1, 0, 2, 10, 10**3, 10**9, 10**18)))
    return _put(data, place, found * random.choice((-1, 0, 1e-6, 0.5, 2, 10, 1e3, 1e6, 1e12, 1e200)))


def _drop(random: Random, data: Any, place: Path_) -> Any:
    return _put(data, place, None, drop=True) if place else random.choice((None, [], {}, "", 1))


def _add(random: Random, data: Any, place: Path_) -> Any:
    found = _at(data, place)
    value = copy.deepcopy(random.choice(_VALUES))
    if isinstance(found, dict):
        return _put(data, place, {**found, random.choice(_NAMES): value})
    if isinstance(found, list):
        extra = copy.deepcopy(random.choice(found)) if found and random.random() < 0.7 else value
        return _put(data, place, [*found, extra])
    return _put(data, place, [found])


def _rename(random: Random, data: Any, place: Path_) -> Any:
    found = _at(data, place)
    if not isinstance(found, dict) or not found:
        return _replace(random, data, place)
    chosen, name = random.choice(list(found)), random.choice((*_NAMES, *map(str, found)))
    return _put(data, place, {name if key == chosen else key: value for key, value in found.items()})


def _transplant(random: Random, data: Any, place: Path_) -> Any:
    return _put(data, place, copy.deepcopy(_at(data, random.choice(list(_places(data, ()))))))


def _nest(random: Random, data: Any, place: Path_) -> Any:
    made = _at(data, place)
    for _ in range(random.choice((1, 3, 60, 100))):
        made = [made] if random.random() < 0.5 else {"x": made}
    return _put(data, place, made)


def _repeat(random: Random, data: Any, place: Path_) -> Any:
    found = _at(data, place)
    if isinstance(found, list):
        return _put(data, place, found * random.choice((0, 2, 50)))
    if isinstance(found, str):
        return _put(data, place, found * random.choice((0, 2, 500)))
    return _replace(random, data, place)


_CHANGES: tuple[Callable[[Random, Any, Path_], Any], ...] = (
    *[_replace] * 4,
    _scale,
    _scale,
    _drop,
    _add,
    _rename,
    _transplant,
    _nest,
    _repeat,
)


def _places(data: Any, place: Path_) -> Iterator[Path_]:
    yield place
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _places(value, (*place, key))
    elif isinstance(data, list):
        # Of long lists the first, so that other fields have their turn.
        for number, value in enumerate(data[:6]):
            yield from _places(value, (*place, number))


def _at(data: Any, place: Path_) -> Any:
    for part in place:
        data = data[part]
    return data


def _put(data: Any, place: Path_, value: Any, drop: bool = False) -> Any:
    if not place:
        return value
    holder = _at(data, place[:-1])
    if drop:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return data


def _parsed(text: Any) -> Any:
    """The data in text that is JSON of more than one value."""
    if not isinstance(text, str) or text[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _dumped(data: Any) -> str:
    return json.dumps(data)


def as_json(data: Any) -> bytes:
    """The file of plain data, whatever is in it."""
    return json.dumps(data).encode()


def as_yaml(data: Any) -> bytes:
    """The same in YAML."""
    return yaml.safe_dump(data, sort_keys=False).encode("utf-8", "surrogatepass")


def damage(random: Random, content: bytes) -> bytes:
    """The bytes of a file, changed without regard to what they mean."""
    return random.choice(_DAMAGES)(random, content)


def _cut(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _flip(random: Random, content: bytes) -> bytes:
    made = bytearray(content)
    for _ in range(random.choice((1, 2, 10))):
        if made:
            made[random.randrange(len(made))] ^= 1 << random.randrange(8)
    return bytes(made)


def _overwrite(random: Random, content: bytes) -> bytes:
    place = random.randrange(len(content) + 1)
    piece = random.choice((random.randbytes(16), b"\x00", b"\xff\xfe", b"\n", b"{", b"]", b'"', b"\\u0000", b"1e999"))
    return content[:place] + piece + content[place + random.choice((0, len(piece))) :]


def _lines(random: Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    first, second = random.randrange(len(lines)), random.randrange(len(lines))
    change = random.randrange(3)
    if change == 0:
        lines[first], lines[second] = lines[second], lines[first]
    elif change == 1:
        lines.insert(first, lines[second])
    else:
        del lines[first]
    return b"".join(lines)


def _move(random: Random, content: bytes) -> bytes:
    ends = sorted(random.randrange(len(content) + 1) for _ in range(3))
    return content[: ends[0]] + content[ends[1] : ends[2]] + content[ends[0] : ends[1]] + content[ends[2] :]


def _instead(random: Random, content: bytes) -> bytes:
    return random.choice((b"", b"\n", b"null", b"[]", b"{}", b'"x"', b"1", b"\x00" * 64, random.randbytes(300)))


def _bomb(random: Random, content: bytes) -> bytes:
    return random.choice(_BOMBS)()


_DAMAGES: tuple[Callable[[Random, bytes], bytes], ...] = (
    *[_cut] * 3,
    *[_flip] * 3,
    *[_overwrite] * 3,
    _lines,
    _lines,
    _move,
    _instead,
)


def bombs() -> Iterator[bytes]:
    """Short files that are much once they are read."""
    return (make() for make in _BOMBS)


def _aliases() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join(lines).encode()


def _merges() -> bytes:
    lines = ["m0: &m0 {k: v}"]
    lines += [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}], k{n}: v}}" for n in range(1, 12)]
    return "\n".join(lines).encode()


def _chained_merges() -> bytes:
    lines = ["m0: &m0 {k0: v}"]
    lines += [f"m{n}: &m{n} {{<<: *m{n - 1}, k{n}: v}}" for n in range(1, 1500)]
    return "\n".join(lines).encode()


def _recursion() -> bytes:
    return b"a: &a [*a, *a]\nb: &b {<<: *b}\n"


_BOMBS: tuple[Callable[[], bytes], ...] = (
    _aliases,
    _merges,
    _chained_merges,
    _recursion,
    lambda: b"[" * 100_000,
    lambda: b"[" * 100_000 + b"]" * 100_000,
    lambda: b'{"x":' * 100_000,
    lambda: b"a: " * 10_000,
    lambda: b"- " * 5_000,
    lambda: b"? " * 5_000,
    lambda: b"[[],[]," * 100_000,
    lambda: b"[" + b"[]," * 5_000_000 + b"[]]",
    lambda: b"{" + b",".join(b'"k%06d":%d' % (number, number) for number in range(400_000)) + b"}",
    lambda: b"[" + b'{"a":1},' * 150_000 + b"1]",
    lambda: b"\n" * 4_000_000,
    lambda: b"#\n" * 2_000_000,
    lambda: b"- x\n" * 1_000_000,
    lambda: b"[" + b"0," * 20_000_000 + b"0]",
    lambda: b"9" * 1_000_000,
    lambda: b"1" + b"_0" * 100_000,
    lambda: b"x: 1" + b":59" * 100_000,
    lambda: b"0x" + b"f" * 1_000_000,
    lambda: b"x: !!float " + b"1" * 1_000_000,
    lambda: b'"' + b"\xf0\x9f\x98\x80" + b"x" * 3_000_000 + b'"',
    lambda: b"!!python/object/apply:os.system [true]",
    lambda: b"\xff\xfe" + "{}".encode("utf-16-le"),
    lambda: b"%YAML 9.9\n---\na: 1\n--- \nb: 2\n",
)
