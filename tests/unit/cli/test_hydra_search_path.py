"""Hydra applications of one's own see this package's config groups if they ask for them, and otherwise not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

from lightning_autosync.cluster import resolve_cluster

ASKS = "hydra: {searchpath: [pkg://lightning_autosync.conf]}\n"


def composed(folder: Path, *overrides: str) -> Any:
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize("option", ["data=digits", "cluster=four_equal", "model=vgg_like"])
def test_an_application_that_does_not_ask_sees_none_of_the_groups(tmp_path: Path, option: str) -> None:
    group = option.partition("=")[0]
    (tmp_path / "config.yaml").write_text(f"defaults:\n  - {group}: own\n")
    (tmp_path / group).mkdir()
    (tmp_path / group / "own.yaml").write_text("mine: true\n")
    assert composed(tmp_path)[group] == {"mine": True}
    with pytest.raises(MissingConfigException, match=rf"Could not find '{option.replace('=', '/')}'"):
        composed(tmp_path, option)


def test_an_application_that_asks_names_a_shipped_cluster(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"defaults:\n  - cluster: two_racks_2to1\n  - sync: byteps\n{ASKS}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not available")
        config = composed(tmp_path)
    assert config.cluster.name == resolve_cluster("two_racks_2to1").name
    assert config.sync.plan == "byteps"
    assert composed(tmp_path, "cluster=four_equal").cluster.name == "four_equal"


def test_an_applications_own_option_goes_before_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"defaults:\n  - cluster: one_node\n{ASKS}")
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "one_node.yaml").write_text("mine: true\n")
    assert composed(tmp_path).cluster == {"mine": True}


def test_a_command_line_asks(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("x: 1\n")
    asked = composed(tmp_path, "hydra.searchpath=[pkg://lightning_autosync.conf]", "+sync=byteps")
    assert asked.sync.plan == "byteps"
