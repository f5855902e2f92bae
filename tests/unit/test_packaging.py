"""What pyproject.toml says about packages, in step with errors and with the lowest versions that are tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from missing import DISTRIBUTIONS

from lightning_autosync.errors import EXTRAS

ROOT = Path(__file__).parents[2]
PARTS = re.compile(r"([\w-]+)(?:\[([\w,-]+)\])?(?:>=([\d.]+))?")
"""Name, extras and lowest version of a requirement."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 does not have it")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def required(requirements: list[str], project: dict[str, Any]) -> dict[str, str | None]:
    """The packages of some requirements with their lowest versions, extras of this project followed."""
    found: dict[str, str | None] = {}
    for requirement in requirements:
        parts = PARTS.match(requirement)
        assert parts is not None
        name, extras, lowest = parts.groups()
        if name != project["name"]:
            found[name] = lowest
            continue
        for extra in extras.split(","):
            found |= required(project["optional-dependencies"][extra], project)
    return found


def test_extras_install_what_errors_say(project: dict[str, Any]) -> None:
    # OmegaConf comes with Hydra.
    of_extras = {DISTRIBUTIONS.get(name, name): extra for name, extra in EXTRAS.items() if name != "omegaconf"}
    always = required(project["dependencies"], project)
    for package, extra in of_extras.items():
        assert package not in always
        assert package in required([f"{project['name']}[{extra}]"], project)
    everything = {*always, *of_extras, "greenlet", "pytorch-lightning"} - {"ray"}  # which is as large as the others
    assert always.keys() | required([f"{project['name']}[all]"], project).keys() == everything


def test_the_lowest_versions_are_those_of_the_project(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    lowest = required([*project["dependencies"], f"{project['name']}[all]"], project)
    assert pinned.keys() == lowest.keys()
    for name, version in lowest.items():
        assert version is not None
        assert pinned[name] == version or pinned[name].startswith(f"{version}."), name
