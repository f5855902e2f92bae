"""README, docs/ and what stands beside them: short, without dead links, and about commands and names that exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

import lightning_autosync
from lightning_autosync import ClusterSpec, HybridPlan, SyncPlan
from lightning_autosync.cli.application import VERBS
from lightning_autosync.cli.configuration import check_overrides
from lightning_autosync.cluster import configuration_directory

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README_BYTES = 8000

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"\bautosync ((?:\\\n|[^`\n|#\\])*)")
VERB = re.compile(r"[a-z]+")
EXPERIMENT = re.compile(r"\bexperiment=([\w.-]+)")
PLACEHOLDER = "NAME"
PROGRAM = re.compile(r"\bpython (?:-m )?((?:tests|lightning_autosync|examples)[./][\w./]+)")
MARKDOWN_CELL = re.compile(r"^# %% \[markdown\]\n((?:#.*\n)+)", re.MULTILINE)
NOTEBOOKS = [path for path in sorted((ROOT / "examples").glob("*.py")) if MARKDOWN_CELL.search(path.read_text())]
REPRODUCE = ROOT / "docs" / "reproduce.md"


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def code(page: Path) -> list[str]:
    """Everything that is set as code, in spans that end on their line or the next one, and in blocks."""
    text = page.read_text()
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return [" ".join(span.split()) for span in spans] + blocks(page, "console")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_one_screen_long() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


def test_the_readme_leads_to_every_page() -> None:
    found = {target.partition("#")[0] for target in LINK.findall((ROOT / "README.md").read_text())}
    assert {name for name in NAMES if name.startswith("docs/")} <= found


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


def test_commands_exist(page: Path) -> None:
    for text in code(page):
        for rest in COMMAND.findall(text):
            verb = VERB.match(rest)
            assert verb is None or verb[0] in VERBS, rest


def test_experiments_exist(page: Path) -> None:
    shipped = {file.stem for file in (configuration_directory() / "experiment").glob("*.yaml")}
    found = {name for text in code(page) for name in EXPERIMENT.findall(text)}
    assert found - {PLACEHOLDER} <= shipped


def test_programs_exist(page: Path) -> None:
    for name in (found for text in code(page) for found in PROGRAM.findall(text)):
        path = ROOT / name.removesuffix(".py").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_commands_that_reproduce_papers_compose() -> None:
    lines = (line for text in code(REPRODUCE) for line in text.replace("\\\n", " ").splitlines())
    commands = [shlex.split(line) for line in lines if line.startswith("autosync ")]
    assert {"bench", "collect", "converge", "fit", "tune", "validate"} <= {verb for _, verb, *_ in commands}
    for _, verb, *words in commands:
        check_overrides(verb, words)


def test_shipped_options_exist(page: Path) -> None:
    """``cluster=NAME`` and other groups: a word in lower case is an option of the group, unless it is a file."""
    groups = {group.name: {file.stem for file in group.glob("*.yaml")} for group in configuration_directory().iterdir()}
    whole = (text.replace("\\\n", " ") for text in code(page))
    for command in (found for text in whole for found in COMMAND.findall(text)):
        for argument in shlex.split(command.replace("'", "")):
            key, _, values = argument.partition("=")
            for value in values.split(",") if key in groups else ():
                if re.fullmatch(r"[a-z][a-z0-9_]*", value):
                    assert value in groups[key], argument


def test_python_snippets_compile_and_import_what_exists(page: Path) -> None:
    for snippet in blocks(page, "python"):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                module = importlib.import_module(node.module)
                assert not [name.name for name in node.names if not hasattr(module, name.name)]


def test_plans_and_clusters_are_valid(page: Path) -> None:
    kinds = {document.FORMAT: document for document in (SyncPlan, HybridPlan, ClusterSpec)}
    for text in blocks(page, "yaml"):
        data = yaml.safe_load(text)
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
