"""Help for a verb's configuration, and a clear message for each wrong key or option."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lightning_autosync.cli.arguments import SEARCH_PATH, for_compose
from lightning_autosync.cluster import configuration_directory
from lightning_autosync.documents import did_you_mean, unknown_name
from lightning_autosync.errors import DocumentError

WIDTH = 120
_PLACES = {
    "emulated": "on this machine behind emulated links of the cluster (root on Linux)",
    "local": "on this machine",
    "ray": "on nodes of a Ray cluster",
    "slurm": "in a SLURM job",
    "ssh": "on the nodes of the cluster, started by ssh",
    "torchrun": "in a job that torchrun or SLURM started already",
}
"""Where the ranks of each launch run."""
_OF_VERBS = re.compile(r"\((\w+(?:, \w+)*)\) ")
"""The beginning of an option's first comment if it is only for some verbs: ``# (converge, train) What it is.``"""
_MOST_NEAR = 3
"""Largest number of options that a message suggests."""
_SHORT_WITH_MORE = re.compile("-[^-].")
"""The beginning of a word that the parser takes for a short option and its value."""
_WRONG_KEY = re.compile(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'")
_WRONG_VALUE = re.compile(r"Error merging override (.+)")


def help_text(verb: str, purpose: str) -> str:
    """The usage, the configuration groups with their options, and the keys with their comments."""
    directory = configuration_directory()
    text = (directory / f"{verb}.yaml").read_text()
    data = yaml.safe_load(text)
    entries = [entry for entry in data.get("defaults", []) if isinstance(entry, dict)]
    choices = ((group, choice) for entry in entries for group, choice in entry.items())
    defaults: dict[str, Any] = {group: choice for group, choice in choices if not group.startswith("override ")}
    lines = [f"autosync {verb}: {purpose}", ""]
    lines += [f"usage: autosync {verb} key=value ...", f"       autosync {verb} -m key=value,value ...  (a sweep)"]
    lines += textwrap.dedent(data.get("hydra", {}).get("help", {}).get("header", "")).strip().splitlines()[1:]
    for group, choice in defaults.items():
        lines += ["", f"{group}=OPTION (default: {'none' if choice is None else choice})"]
        lines += [_option_lines(directory / group / f"{option}.yaml") for option in options_of(verb, group)]
    lines += ["", "keys:", *(f"  {line}" for line in _keys(text))]
    lines += ["", f"Keys of an option are set by GROUP.KEY=VALUE, and read in {directory}."]
    lines += ["--config-dir DIR adds options of your own: DIR/GROUP/OPTION.yaml."]
    return "\n".join([*lines, "", *_outputs(verb, data), *_places(verb, defaults)])


def _outputs(verb: str, data: dict[str, Any]) -> Iterator[str]:
    """Where outputs go, which files they are, and, for verbs without launches, where the verb runs."""
    folder = str(data["hydra"]["run"]["dir"])
    for pattern, word in (("${now:%Y-%m-%d}", "DATE"), ("${now:%H-%M-%S}", "TIME"), ("${rank}", "RANK")):
        folder = folder.replace(pattern, word)
    if folder != ".":
        yield f"Outputs go to {folder}, with the log {verb}.log; hydra.run.dir=DIR names another folder."
    if "sweep" in data["hydra"]:
        yield "A sweep has a folder for each run there (or in hydra.sweep.dir=DIR), and ends with a table of results."
    yield from textwrap.dedent(data["hydra"]["help"]["footer"]).splitlines()


def _places(verb: str, groups: Collection[str]) -> Iterator[str]:
    """Where ranks run, for verbs with launches."""
    if "launch" in groups:
        yield from ("Ranks run:", *(f"  {_PLACES[option]}: launch={option}" for option in options_of(verb, "launch")))


def check_overrides(verb: str, arguments: Sequence[str]) -> None:
    """Compose the configuration to check it; for a sweep, with every value at least once.

    Raises:
        DocumentError: a key or an option does not exist; the message names the existing ones.
    """
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    overrides = for_compose(arguments)
    if overrides is None:
        return  # `compose` does not see all files, or --cfg only prints; so leave the check to Hydra
    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        try:
            for combination in _combinations(overrides):
                _check_verb(verb, combination)
                missing = OmegaConf.missing_keys(_compose(verb, combination))
                if missing:
                    raise DocumentError(f"{', '.join(sorted(missing))}: missing; give each as key=value")
        except HydraException as error:
            raise DocumentError(_message(verb, overrides, error)) from None


def check_options(verb: str, arguments: Sequence[str]) -> None:
    """Check the options, the words that begin with dashes. Hydra's own error would be its usage.

    Raises:
        DocumentError: an option does not exist or lacks its value; the message names the nearest option or key, or the
            commands that list them.
    """
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        # The parser takes '-model=vgg' for '-m' with a value, and would tell of 'odel=vgg'.
        for word in arguments:
            if _SHORT_WITH_MORE.match(word) and word.partition("=")[0] not in options:
                raise DocumentError(_no_such_option(verb, word, options))
        raise DocumentError(message.removeprefix("argument "))

    parser = get_args_parser()
    parser.error = refuse
    options = [name for action in parser._actions for name in action.option_strings]
    _, unknown = parser.parse_known_args(list(arguments))
    for word in unknown:
        if not word.startswith("-"):
            raise DocumentError(f"'{word}': give all words of the form key=value side by side, not around an option")
        raise DocumentError(_no_such_option(verb, word, options))


def _no_such_option(verb: str, word: str, options: Sequence[str]) -> str:
    """The message on an option that does not exist: the nearest option or key, or the commands that list them."""
    name, _, value = word.lstrip("-").partition("=")
    meant = {key: f"{key}={value or 'VALUE'}" for key in _keys_of(verb)}
    meant |= {option.lstrip("-"): option for option in options if option.startswith("--")}
    if near := did_you_mean(name, meant, meant.__getitem__):
        return f"'{word}': no such option; {near}"
    return (
        f"'{word}': no such option; give key=value: 'autosync {verb} --help' lists the keys, and "
        f"'autosync {verb} --hydra-help' the options"
    )


def _keys_of(verb: str) -> list[str]:
    """The keys and groups of a verb at the top of its configuration."""
    data = yaml.safe_load((configuration_directory() / f"{verb}.yaml").read_text())
    groups = [name for entry in data.get("defaults", []) if isinstance(entry, dict) for name in entry]
    return [name for name in (*data, *groups) if name not in ("defaults", "hydra") and " " not in name]


def _check_verb(verb: str, overrides: Sequence[str]) -> None:
    """Refuse an option that is only for other verbs; the message names the options for this verb."""
    for group, _, option in (override.lstrip("+").partition("=") for override in overrides):
        if option == "null" and group and _has_group(verb, group):
            raise DocumentError(f"{group}: null is not an option; leave it out, or remove the default with ~{group}")
        path = configuration_directory() / group / f"{option}.yaml"
        if path.is_file() and not _is_for(verb, path):
            others = _verbs_of(path)
            allowed = ", ".join(options_of(verb, group))
            raise DocumentError(f"{group}: '{option}' is only for {', '.join(others)}; allowed: {allowed}")


def options_of(verb: str, group: str) -> list[str]:
    """The options of a group for the verb."""
    paths = sorted((configuration_directory() / group).glob("*.yaml"))
    return [path.stem for path in paths if _is_for(verb, path)]


def _is_for(verb: str, path: Path) -> bool:
    verbs = _verbs_of(path)
    return not verbs or verb in verbs


def _verbs_of(path: Path) -> list[str]:
    """The verbs of an option; empty if it is for all verbs."""
    found = _OF_VERBS.match(_remark(path))
    return found[1].split(", ") if found else []


def _remark(path: Path) -> str:
    """The first comment of a file that is not a directive for Hydra (``# @package``)."""
    comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@")), "")


def _option_lines(path: Path) -> str:
    """An option with its remark, on as many lines as it takes."""
    remark = _OF_VERBS.sub("", _remark(path), count=1)
    first, rest = f"  {path.stem:24} ", " " * 27
    made = textwrap.fill(
        remark, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return made or first.rstrip()


def _keys(text: str) -> list[str]:
    """The lines of a configuration between its defaults list and its settings for Hydra."""
    lines = text.partition("\nhydra:")[0].splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("defaults:")), -1) + 1
    while start < len(lines) and lines[start].startswith(" "):
        start += 1
    return "\n".join(lines[start:]).strip("\n").splitlines()


def _combinations(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Overrides without sweeps: first values of all keys, then each other value with first values of other keys."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import IntervalSweep, Override

    def values(override: Override) -> list[str]:
        if not override.is_sweep_override():
            return [str(override.input_line)]
        key, sweep = override.get_key_element(), override.value()
        if isinstance(sweep, IntervalSweep):
            return [f"{key}={sweep.start}", f"{key}={sweep.end}"]
        return [f"{key}={value}" for value in override.sweep_string_iterator()]

    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    choices = [values(override) for override in parser.parse_overrides(list(overrides))]
    first = [values[0] for values in choices]
    yield first
    for place, values_here in enumerate(choices):
        for value in values_here[1:]:
            yield [*first[:place], value, *first[place + 1 :]]


def _compose(verb: str, overrides: list[str], with_hydra: bool = False) -> Any:
    from hydra import compose

    return compose(verb, overrides, return_hydra_config=with_hydra)


def _message(verb: str, overrides: Sequence[str], error: Exception) -> str:
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        beside = set(error.options or ())
        own = [name for name in options_of(verb, group) if name in beside]
        foreign = sorted(beside - {path.stem for path in (configuration_directory() / group).glob("*.yaml")})
        known = [*own, *foreign]
        if _is_workload(verb, option):
            told = f"allowed: {', '.join(known)}; for a model of the catalogue, give workload={option}"
            return f"{group}: '{option}' is not known; {told}"
        return f"{group}: '{option}' is {unknown_name(option, known, _MOST_NEAR)}"
    if isinstance(error, OverrideParseException):
        return f"'{error.override}': not of the form key=value: {_first_line(error)}"
    if found := _WRONG_KEY.match(str(error)):
        key = found[1]
        if _has_group(verb, key) and any(override.startswith(f"{key}={{") for override in overrides):
            return _braces(key)
        if "already at" in str(error):
            return f"{key}: key exists already; leave out the +"
        return _unknown(verb, key, overrides)
    if (merged := _WRONG_VALUE.match(str(error))) and error.__cause__ is not None:
        return f"'{merged[1]}': {_first_line(error.__cause__)}"
    return _first_line(error)


def _unknown(verb: str, key: str, overrides: Sequence[str]) -> str:
    """The message on an unknown key: the keys beside it, or how to add it to an empty mapping."""
    from omegaconf import OmegaConf

    groups = _groups(verb)
    chosen = [
        override
        for override in overrides
        if override.startswith("hydra/") or override.partition("=")[0] in (*groups, SEARCH_PATH)
    ]
    node, place = _compose(verb, next(iter(_combinations(chosen))), key.startswith("hydra.")), ""
    for part in key.split(".")[:-1]:
        if not hasattr(node, "keys") or part not in node or not hasattr(node[part], "keys"):
            break
        node, place = node[part], f"{place}.{part}" if place else part
    depth = place.count(".") + 1 if place else 0
    under = ".".join(key.split(".")[: depth + 1])
    beside: Any = OmegaConf.to_container(node)
    if beside and under != key and beside.get(under.rpartition(".")[2], "none") is None:
        place, beside = under, {}
    if not beside and _has_group(verb, place):
        return f"{key}: no option of {place} is chosen, so it has no keys; give {place}=OPTION, and then {key}=..."
    if not beside:
        return f"{key}: {place} has no keys yet; to add this one, write +{key}=..."
    own = sorted(map(str, node))
    if not place and key in own:
        # Hydra takes KEY=VALUE for an option of a group if any verb has such a group.
        return f"{key}: takes no options for {verb}, but keys and values; set one by +{key}.KEY=VALUE"
    if place.partition(".")[0] == "hydra":  # dozens of keys, which are not this package's
        near = _sentence(did_you_mean(under.rpartition(".")[2], own, f"{place}.{{}}".format))
        return f"{key}: unknown key; {near}'autosync {verb} --cfg hydra' lists the keys of Hydra"
    names = sorted({*own, *([] if place else groups)})
    add = {"contenders": "one", "trainer": "an argument of Lightning's Trainer"}.get(place, "")
    add = add and f"; to add {add}, write +{key}=..."
    near, last = "", under.rpartition(".")[2]
    if last not in names:
        near = did_you_mean(last, names, (f"{place}.{{}}" if place else "{}").format)
        near = _sentence(near or ("" if place else _meant_option(verb, key, overrides)))
    return f"{key}: unknown key; {near}allowed{f' in {place}' if place else ''}: {', '.join(names)}{add}"


def _meant_option(verb: str, key: str, overrides: Sequence[str]) -> str:
    """A question about an unknown group: whether the group that has an option like its value was meant."""
    value = next((value for name, _, value in (each.partition("=") for each in overrides) if name == key), "")
    options = {option: f"{group}={option}" for group in _groups(verb) for option in options_of(verb, group)}
    return did_you_mean(value, options, options.__getitem__)


def _sentence(question: str) -> str:
    """A question with a blank behind it, if there is one."""
    return f"{question} " if question else ""


def _braces(group: str) -> str:
    """The message where values in braces are given for a group whose option is chosen already, as by an experiment."""
    file = f"{group}=FILE, which has these values, or " if group == "cluster" else ""
    return (
        f"{group}={{...}}: values in braces cannot replace an option that the defaults or experiment= choose; give "
        f"{file}{group}=OPTION and then {group}.KEY=VALUE"
    )


def _is_workload(verb: str, option: str) -> bool:
    """Whether the verb takes this name as a workload of the catalogue."""
    from lightning_autosync.workload import catalogue

    return verb == "predict" and option in catalogue.names()


def _groups(verb: str) -> list[str]:
    """The groups of options of the verb."""
    return [path.name for path in configuration_directory().iterdir() if path.is_dir() and _has_group(verb, path.name)]


def _has_group(verb: str, group: str) -> bool:
    return re.search(rf"^  - {group}:", (configuration_directory() / f"{verb}.yaml").read_text(), re.M) is not None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
