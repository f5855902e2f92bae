"""README, docs/ and what stands beside them: short, without dead links, and about commands and names that exist."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from functools import cache
from pathlib import Path

import forked
import page_snippets
import pytest
import reference
import yaml
from page_snippets import FENCE
from site_links import relinked

import lightning_autosync
from lightning_autosync import (
    AutoSyncFabricStrategy,
    AutoSyncStrategy,
    ClusterSpec,
    HybridPlan,
    SyncPlan,
    TuningSettings,
)
from lightning_autosync.cli.application import VERBS
from lightning_autosync.cli.arguments import with_names
from lightning_autosync.cli.configuration import check_overrides
from lightning_autosync.cluster import configuration_directory
from lightning_autosync.errors import DocumentError
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.strategy.settings import _REFUSED

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README_BYTES = 8000
LONG = {"CHANGELOG.md", "reproduce.md", *(page.name for page in ROOT.glob("docs/measured*.md"))}
"""Pages with many commands, which are composed by `make test-all` only: each takes 0.1 to 0.2 s of a core."""

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"\bautosync ([a-z]+)\b((?:\\\n|[^`\n|#\\])*)")
IMPORT = re.compile(r"^from (lightning_autosync[\w.]*) import", re.MULTILINE)
PROGRAM = re.compile(r"\bpython (?:-m )?((?:tests|lightning_autosync|examples)[./][\w./]+)")
CONFIGURATION = {"defaults", "trainer"}
"""Keys of configurations for Hydra and for LightningCLI."""
PLACEHOLDER = re.compile(r"[A-Z]+|\.\.\.")
"""A value of an option group that stands for any option."""
MARKDOWN_CELL = re.compile(r"^# %% \[markdown\]\n((?:#.*\n)+)", re.MULTILINE)
NOTEBOOKS = [path for path in sorted((ROOT / "examples").glob("*.py")) if MARKDOWN_CELL.search(path.read_text())]


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def blocks(page: Path, language: str) -> list[str]:
    return [text for _, text in page_snippets.blocks(page, language)]


def spans(page: Path) -> list[str]:
    """Text that is set as code within lines; a span may end on the next line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text()))]


def commands(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Verb and arguments of each ``autosync VERB ...``, without arguments that stand for any option."""
    groups = {group.name for group in configuration_directory().iterdir() if group.is_dir()}
    for verb, rest in COMMAND.findall(text.replace("\\\n", " ")):
        kept = []
        if rest.count("'") % 2:  # the end of a command within another one
            rest = rest[: rest.rindex("'")]
        for word in shlex.split(rest):
            key, _, value = word.partition("=")
            if word == "..." or (key in groups and PLACEHOLDER.fullmatch(value)):
                continue
            kept.append("cluster=four_equal" if key == "cluster" and value.endswith(".yaml") else word)
        yield verb, tuple(kept)


@cache
def refusal(verb: str, arguments: tuple[str, ...]) -> str:
    """Why Hydra cannot compose a command's configuration; empty if it can, and for a verb alone."""
    try:
        if arguments:
            check_overrides(verb, with_names(verb, arguments))
    except DocumentError as error:
        return str(error)
    return ""


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_one_screen_long() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


def test_every_page_can_be_reached() -> None:
    """README and the site's index have links to pages; the site's navigation has each page once."""
    index = (ROOT / "docs/index.md").read_text()
    found = {target.partition("#")[0] for target in LINK.findall((ROOT / "README.md").read_text())}
    found |= {f"docs/{target.partition('#')[0]}" for target in LINK.findall(index)}
    pages = {name for name in NAMES if name.startswith("docs/")} - {"docs/index.md"}
    assert pages <= found
    (*toctrees,) = (block for name, block in re.findall(r"^```{(toctree)}\n(.*?)^```$", index, re.M | re.S))
    listed = [line for block in toctrees for line in block.splitlines() if re.fullmatch(r"[\w-]+", line)]
    assert sorted(listed) == sorted(Path(name).stem for name in pages)


def test_relative_links_lead_somewhere(page: Path) -> None:
    check_links(FENCE.sub("", page.read_text()), page)


def check_links(text: str, page: Path) -> None:
    for target in LINK.findall(text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_of_notebooks_have_valid_links_and_commands(notebook: Path) -> None:
    """Commands name a file of a cluster, for which a shipped one stands here."""
    cells = MARKDOWN_CELL.findall(notebook.read_text())
    assert cells
    told = "\n".join(line.removeprefix("#").strip() for cell in cells for line in cell.splitlines())
    check_links(told, notebook)
    for words in (span.split() for span in re.findall(r"`([^`]+)`", told)):
        if words[0] == "autosync":
            check_overrides(words[1], [word.replace("=links.yaml", "=four_equal") for word in words[2:]])


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG), id=page.name) for page in PAGES]
)
def test_hydra_can_compose_every_command(page: Path) -> None:
    for text in blocks(page, "console"):
        for verb, arguments in commands(text):
            assert not refusal(verb, arguments), arguments
    for span in spans(page):
        for verb, arguments in commands(span):
            assert verb in VERBS, span
            found = refusal(verb, arguments)
            assert not found or "missing; give each as" in found, span  # a span may leave out what the verb needs


def test_programs_exist(page: Path) -> None:
    for name in PROGRAM.findall(page.read_text()):
        path = ROOT / name.removesuffix(".py").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_snippets_run(page: Path, tmp_path: Path) -> None:
    script = Path(page_snippets.__file__)
    done = forked.run([sys.executable, script, page], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(" ran\n") == len(blocks(page, "python"))


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_a_verb_says_what_every_key_means(verb: str) -> None:
    rows = re.findall(r"^\| `([\w.@]+)` \| (.+) \| (.+) \|$", reference.verb_page(verb, VERBS[verb]), re.MULTILINE)
    data = yaml.safe_load((configuration_directory() / f"{verb}.yaml").read_text())
    expected = {*data} - {"defaults", "hydra"}
    assert expected <= {name.partition(".")[0] for name, _, _ in rows}
    assert all(len(told) > 5 for _, _, told in rows)


def test_keys_come_from_classes_with_defaults_from_files() -> None:
    page = reference.verb_page("tune", "search")
    assert "| `trial.min_steps` | `5` | " in page
    assert (
        "| `scheduling` | `batch` | The kernel's scheduling policy for all contenders. Allowed: `none`, `batch` |"
        in page
    )
    assert "| `search` | `autosync` | [autosync](../options/search.md#searchautosync), " in page


def test_the_site_has_every_option_and_every_public_name(tmp_path: Path) -> None:
    (tmp_path / "old.md").touch()
    reference.write_pages(tmp_path)
    assert not (tmp_path / "old.md").exists()
    for option in configuration_directory().glob("*/*.yaml"):
        text = (tmp_path / f"options/{option.parent.name}.md").read_text()
        assert f"## {option.parent.name}={option.stem}\n" in text
    api = (tmp_path / "api/lightning_autosync.rst").read_text()
    for name in set(lightning_autosync.__all__) - {"__version__", "builders"}:
        assert f".. autoclass:: lightning_autosync.{name}\n" in api
    described = "".join(path.read_text() for path in tmp_path.glob("api/*.rst"))
    imported = {name for page in PAGES for text in blocks(page, "python") for name in IMPORT.findall(text)}
    assert imported <= set(re.findall(r"^\.\. currentmodule:: (.*)$", described, re.MULTILINE))


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](tuning.md#watch-it)", "[a](../tuning.md#watch-it)"),
        ("[a](../SECURITY.md)", "[a](security.md)"),
        ("[a](../conf/cluster/four_equal.yaml)", "[a](options/cluster.md#clusterfour_equal)"),
        ("[a](../examples/fabric.py)", "[a](examples.md#fabricpy)"),
        ("[a](../hydra_plugins)", "a"),
        ("[a](https://x.y/z)", "[a](https://x.y/z)"),
        ("```\n[a](tuning.md)\n```", "```\n[a](tuning.md)\n```"),
    ],
)
def test_links_of_the_repository_lead_to_pages_of_the_site(link: str, expected: str) -> None:
    assert relinked(link, ROOT / "docs", "generated/page.md") == expected


def defaults_told(page: str, title: str) -> dict[str, str]:
    """The first column of the first table below a heading, with the cell that has the default."""
    text = (ROOT / page).read_text().partition(f"# {title}\n")[2]
    table = re.search(r"^\| *\w+ \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    rows = [re.split(r" *(?<!\\)\| *", row.strip("|\n").strip()) for row in table[1].splitlines(keepends=True)]
    place = 1 if page == "docs/options.md" else -1
    return {row[0].strip("`"): row[place].strip("`") for row in rows}


def written(default: object) -> str:
    if isinstance(default, timedelta):
        return f"{default.total_seconds() / 60:g} minutes"
    return f'"{default}"' if isinstance(default, str) else repr(default)


def test_the_page_of_options_has_the_arguments_of_the_strategies_with_their_defaults() -> None:
    told = defaults_told("docs/options.md", "Arguments of the strategy")
    signature = inspect.signature(AutoSyncStrategy.__init__).parameters
    taken = {name: written(each.default) for name, each in signature.items() if name not in ("self", *_REFUSED)}
    assert told == taken
    fabric = {*inspect.signature(AutoSyncFabricStrategy.__init__).parameters} - {"self"}
    assert fabric == {*told} - {"heartbeat", "stall", "precision_plugin"} | {"precision"}


@pytest.mark.parametrize(
    ("page", "title", "settings"),
    [("docs/options.md", "Heartbeat", HeartbeatSettings), ("docs/tuning.md", "Settings", TuningSettings)],
)
def test_tables_of_settings_have_all_fields_with_their_defaults(page: str, title: str, settings: type) -> None:
    expected = {each.name: f"{each.default}".removesuffix(".0") for each in fields(settings)}
    expected |= {"cache": "the user's"} if "cache" in expected else {}
    told = {name: default.removesuffix(".0") for name, default in defaults_told(page, title).items()}
    assert told == expected


def test_the_page_of_options_has_all_environment_variables() -> None:
    """Those that the package gives to its own processes are left out."""
    source = "".join(path.read_text() for path in (ROOT / "lightning_autosync").rglob("*.py"))
    read = set(re.findall(r'"((?:LIGHTNING_)?AUTOSYNC_\w+)"', source)) - {"AUTOSYNC_RELAY_KEY", "AUTOSYNC_STORAGE_"}
    page = (ROOT / "docs/options.md").read_text().partition("## Environment variables")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == read


def test_plans_and_clusters_are_valid(page: Path) -> None:
    kinds = {document.FORMAT: document for document in (SyncPlan, HybridPlan, ClusterSpec)}
    for text in blocks(page, "yaml"):
        data = yaml.safe_load(text)
        if CONFIGURATION & data.keys():
            continue
        kinds[data["format"]].from_dict(data, str(page))


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lightning_autosync.__version__


def test_hooks_are_local_and_those_of_make_lint() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    entries = {hook["entry"].split()[0] for hook in repositories[0]["hooks"]}
    assert entries == {f".venv/bin/{tool}" for tool in ("ruff", "mypy", "lint-imports")}


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(lightning_autosync.__file__).parent / "py.typed").exists()
