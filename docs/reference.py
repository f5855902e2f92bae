"""Pages of the site that are made from code: subcommands, options, examples, the API, and the files beside ``docs/``.

`conf.py` writes them to ``docs/generated`` before each build, so they cannot be out of date.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel
from site_links import BESIDE, GENERATED, ROOT, relinked, slug

from lightning_autosync.cli.application import VERBS
from lightning_autosync.cli.configuration import options_of
from lightning_autosync.cluster import configuration_directory

MODULES = (
    "lightning_autosync",
    "lightning_autosync.cluster",
    "lightning_autosync.plan",
    "lightning_autosync.plan.builders",
    "lightning_autosync.plan.topologies",
    "lightning_autosync.plan.codecs",
    "lightning_autosync.workload",
    "lightning_autosync.workload.catalogue",
    "lightning_autosync.replay",
    "lightning_autosync.hybrid",
    "lightning_autosync.search.sampler",
    "lightning_autosync.strategy.slowing.lightning",
    "lightning_autosync.training.digits",
    "lightning_autosync.engine.codecs",
    "lightning_autosync.documents",
    "lightning_autosync.errors",
)
"""Modules whose public names are in the API. A name that several have is on the page of the first."""
GROUPS = {
    "cluster": "the machines of a job and the links between them",
    "contenders": "what a bench measures beside DDP",
    "data": "what a LightningModule learns from",
    "ddp": "the settings of DDP that are opponents",
    "experiment": "all keys of one of the measurements in [Measured results](../../measured.md)",
    "launch": "where the ranks run",
    "methods": "the methods that `autosync converge` compares",
    "model": "the model",
    "parallel": "whether operators may be split, too",
    "search": "how plans are proposed",
    "simulator": "what predicts the times of plans",
    "sync": "how `autosync train` synchronizes gradients",
    "task": "what `autosync converge` trains",
    "transfer": "earlier results that a search starts from",
}
"""The option groups, which are the folders in ``conf/``, with their purposes."""

_LINE = re.compile(r"( *)([\w@]+):(?: +(?!#)(.*?))?(?: +# (.*))?")
_ATTRIBUTE = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)
_HIDDEN = "combined_loader, model_config, model_post_init"


def write_pages(folder: Path) -> None:
    """Write all pages to a folder, and delete pages that are no longer made."""
    pages = dict(_pages())
    for old in folder.rglob("*.*"):
        if old.relative_to(folder).as_posix() not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # Sphinx does not read an unchanged page again
            path.write_text(text)


def _pages() -> Iterator[tuple[str, str]]:
    """The pages: name of the file and text."""
    for file, name in BESIDE.items():
        yield f"{name}.md", relinked((ROOT / file).read_text(), (ROOT / file).parent, f"{GENERATED}/{name}.md")
    named = {f"autosync {name}": name for name in VERBS}
    yield "subcommands/index.md", _contents("Subcommands and their keys", named, VERBS)
    for verb, purpose in VERBS.items():
        yield f"subcommands/{verb}.md", verb_page(verb, purpose)
    yield "options/index.md", _contents("Options", {f"{name}=": name for name in GROUPS}, GROUPS)
    for group in GROUPS:
        yield f"options/{group}.md", options_page(group)
    yield "examples.md", examples_page()
    documented: dict[int, str] = {}
    purposes = {name: first_line(importlib.import_module(name)) for name in MODULES}
    yield (
        "api/index.md",
        _contents("API", {name.removeprefix("lightning_autosync."): name for name in MODULES}, purposes, "rst"),
    )
    for name in MODULES:
        yield f"api/{name}.rst", api_page(importlib.import_module(name), documented)


def _contents(title: str, pages: Mapping[str, str], purposes: Mapping[str, str], suffix: str = "md") -> str:
    """A page that lists pages of its folder, by title, with what each is about."""
    lines = [f"# {title}", "", "| page | what it is about |", "|---|---|"]
    lines += [f"| [`{name}`]({page}.{suffix}) | {_cell(purposes[page])} |" for name, page in pages.items()]
    entries = [f"{name} <{page}>" for name, page in pages.items()]
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# Subcommands (verbs in the code) and their keys


class Key(NamedTuple):
    """A key of a verb's configuration.

    Attributes:
        name: with dots, as on the command line.
        default: as in the file; empty if the key has to be given.
        comment: its comment in the file.
    """

    name: str
    default: str
    comment: str


def verb_page(verb: str, purpose: str) -> str:
    """The page of a verb: usage, option groups, and keys with their defaults and meanings."""
    text = (configuration_directory() / f"{verb}.yaml").read_text()
    data = yaml.safe_load(text)
    taken = _groups_of(data)
    lines = [f"# autosync {verb}", "", f"{purpose[0].upper()}{purpose[1:]}.", "", "```text", _usage(verb, data), "```"]
    if taken:
        lines += ["", "## Option groups", "", "| key | default | options |", "|---|---|---|"]
        lines += [_group_row(verb, key, choice) for key, choice in taken.items()]
    lines += ["", "## Keys", "", "| key | default | meaning |", "|---|---|---|"]
    found = (key for key in keys(text) if key.name not in taken)
    lines += [f"| `{key.name}` | {_code(key.default)} | {meaning(settings_of(verb), key)} |" for key in found]
    return "\n".join([*lines, ""])


def _groups_of(data: Mapping[str, Any]) -> dict[str, str | None]:
    """The option groups of a verb with their defaults."""
    entries = (item for entry in data["defaults"] if isinstance(entry, dict) for item in entry.items())
    return {name: choice for name, choice in entries if not name.startswith("override ")}


def _usage(verb: str, data: Mapping[str, Any]) -> str:
    header = data["hydra"]["help"]["header"].strip().splitlines()[1:]
    return "\n".join([f"autosync {verb} key=value ...", *(line.strip() for line in header)])


def _group_row(verb: str, key: str, choice: str | None) -> str:
    group = key.partition("@")[0]
    links = (f"[{name}](../options/{group}.md#{slug(f'{group}={name}')})" for name in options_of(verb, group))
    return f"| `{key}` | {_code(choice or 'none')} | {', '.join(links)} |"


def keys(text: str) -> list[Key]:
    """The keys in a verb's file, without its defaults list and its settings for Hydra.

    A mapping is shown as its keys if these have comments, else as one key.
    """
    data = yaml.safe_load(text)
    found: list[Key] = []
    place: list[tuple[int, str]] = []
    for line in text.partition("\nhydra:")[0].splitlines():
        if (match := _LINE.fullmatch(line)) is None:
            continue
        indent, name, value, comment = match.groups()
        place = [*((width, key) for width, key in place if width < len(indent)), (len(indent), name)]
        path = [key for _, key in place]
        given = reduce(lambda mapping, key: mapping[key], path, data)
        default = value or yaml.safe_dump(given, default_flow_style=True, width=10_000).strip()
        found.append(Key(".".join(path), "" if given == "???" else default, comment or ""))
    return [key for key in found if key.name.partition(".")[0] != "defaults" and _is_shown(key, found)]


def _is_shown(key: Key, among: list[Key]) -> bool:
    """Whether a key has a row: not if its own keys have rows, nor if it is in a mapping that has one."""
    outer = key.name.rpartition(".")[0]
    return not _is_expanded(key.name, among) and (not outer or _is_expanded(outer, among))


def _is_expanded(name: str, among: list[Key]) -> bool:
    return any(key.comment for key in among if key.name.startswith(f"{name}."))


def settings_of(verb: str) -> type[BaseModel]:
    """The class of a verb's settings: the one whose ``parse`` its function calls."""
    module = importlib.import_module(f"lightning_autosync.cli.{verb}")
    (name,) = re.findall(r"(\w+Settings)\.parse\(", inspect.getsource(getattr(module, verb)))
    found: type[BaseModel] = getattr(module, name)
    return found


def meaning(settings: type[BaseModel], key: Key) -> str:
    """What a key means and which values it takes: from the docstring of its class, else from its comment.

    Raises:
        ValueError: neither says it.
    """
    kind: type[BaseModel] | None = settings
    *within, name = key.name.split(".")
    for outer in within:
        kind = None if kind is None else _class_of(kind.model_fields[outer].annotation)
    told = (attributes(kind).get(name) if kind else None) or key.comment
    if not told:
        raise ValueError(f"{settings.__name__}: {key.name}: neither its class nor its file in conf/ says what it means")
    text = re.sub(r"\bNone\b", "`null`", told if told.endswith("...") else told.removesuffix("."))
    values = _literals(kind.model_fields[name].annotation) if kind else []
    if not all(value in told for value in values):
        text += f". Allowed: {', '.join(f'`{value}`' for value in values)}"
    return _cell(f"{text[0].upper()}{text[1:]}")


def attributes(kind: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of their attributes."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        text = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition("\nAttributes:\n")[2]
        for names, words in _ATTRIBUTE.findall(text.partition("\n\n")[0]):
            found |= dict.fromkeys(re.split(", *", names), " ".join(words.split()))
    return found


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and the types inside it."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for one in get_args(annotation):
            yield from _parts(one)


def _class_of(annotation: Any) -> type[BaseModel] | None:
    """The class of settings in an annotation; None if there is none."""
    return next((one for one in _parts(annotation) if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _literals(annotation: Any) -> list[str]:
    """The words that a field takes."""
    found = (get_args(one) for one in _parts(annotation) if get_origin(one) is Literal)
    return [value for values in found for value in values if isinstance(value, str)]


def _code(text: str) -> str:
    return _cell(f"`{text}`") if text else "required"


# Options


def options_page(group: str) -> str:
    """The page of an option group: each option with its file."""
    folder = configuration_directory()
    verbs = [verb for verb in VERBS if group in {key.partition("@")[0] for key in _groups_of(_data(verb))}]
    takers = ", ".join(f"[{verb}](../subcommands/{verb}.md)" for verb in verbs)
    about = f"{GROUPS[group][0].upper()}{GROUPS[group][1:]}."
    lines = [f"# {group}=", "", about, f"For {takers}. `{group}.KEY=VALUE` sets a key of an option.", ""]
    for path in sorted((folder / group).glob("*.yaml")):
        lines += [f"## {group}={path.stem}", "", "```yaml", path.read_text().strip(), "```", ""]
    return "\n".join(lines)


def _data(verb: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((configuration_directory() / f"{verb}.yaml").read_text())
    return data


# Examples


def examples_page() -> str:
    """The scripts in ``examples/``."""
    lines = ["# Examples", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        lines += [f"## {path.name}", "", "```python", path.read_text().strip(), "```", ""]
    return "\n".join(lines)


# API


def api_page(module: ModuleType, documented: dict[int, str]) -> str:
    """The page of a module in reStructuredText.

    Args:
        module: the module.
        documented: names of the objects of earlier pages by ``id``, to which this page refers; it adds its own.
    """
    name = module.__name__
    lines = [name, "=" * len(name), "", inspect.getdoc(module) or "", "", f".. currentmodule:: {name}", ""]
    others = []
    for member in public_names(module):
        found = getattr(module, member)
        if isinstance(found, ModuleType):
            lines += [f"- `{member}`: see :doc:`{found.__name__}`", ""] if found.__name__ in MODULES else []
        elif id(found) in documented:
            lines += [f"- :py:obj:`{member} <{documented[id(found)]}>`", ""]
        elif inspect.isfunction(found) or inspect.isclass(found):
            documented[id(found)] = f"{name}.{member}"
            lines += [*_directive(f"{name}.{member}", found), ""]
        else:
            others.append(f"``{member}``")
    return "\n".join([*lines, *([f"Constants and types: {', '.join(others)}.", ""] if others else [])])


def first_line(module: ModuleType) -> str:
    """The first line of a module's docstring."""
    return (inspect.getdoc(module) or "").partition("\n")[0]


def public_names(module: ModuleType) -> list[str]:
    """The names in ``__all__``, else those that the module defines, without dunder names."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        own = vars(module).items()
        listed = [name for name, value in own if getattr(value, "__module__", None) == module.__name__]
    return [name for name in listed if not name.startswith("_")]


def _directive(name: str, found: Any) -> list[str]:
    """The lines that document a class with the members of this package's bases, or a function."""
    if inspect.isfunction(found):
        return [f".. autofunction:: {name}"]
    foreign = ", ".join(base.__name__ for base in found.__mro__ if not base.__module__.startswith("lightning_autosync"))
    inherited = f"   :inherited-members: {foreign}"
    return [f".. autoclass:: {name}", "   :members:", inherited, f"   :exclude-members: {_HIDDEN}"]
