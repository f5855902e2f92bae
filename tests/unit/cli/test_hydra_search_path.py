"""Applications of one's own find this package's config groups."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

import lightning_autosync
from hydra_plugins.autosync.search_path import PACKAGED, configuration_path
from lightning_autosync.cluster import resolve_cluster


def test_an_application_names_a_shipped_cluster(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults:\n  - cluster: two_racks_2to1\n  - sync: byteps\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("config")
    assert config.cluster.name == resolve_cluster("two_racks_2to1").name
    assert config.sync.plan == "byteps"


def test_an_applications_own_option_goes_before_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults:\n  - cluster: one_node\n")
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "one_node.yaml").write_text("mine: true\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("config").cluster == {"mine": True}


def test_a_wheel_has_them_in_the_package(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "lightning_autosync"
    (package / "conf" / "cluster").mkdir(parents=True)
    monkeypatch.setattr(lightning_autosync, "__file__", str(package / "__init__.py"))
    assert configuration_path() == PACKAGED
    (package / "conf" / "cluster").rmdir()
    assert configuration_path() == f"file://{tmp_path / 'conf'}"
