"""The command line before Hydra reads it: cluster files that share a name, several directories of options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from hydra._internal.utils import get_args_parser

from lightning_autosync.cli import application as cli
from lightning_autosync.cli.arguments import RENAMED_KEYS, prepared, with_todays_keys
from lightning_autosync.cli.configuration import check_overrides
from lightning_autosync.errors import DocumentError
from lightning_autosync.measure.interleaving import TrialSettings
from lightning_autosync.search.tuning.settings import SearchSettings


def cluster_file(path: Path, name: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nodes = [{"name": "one"}, {"name": "two"}]
    document = {"format": "autosync-cluster/1", "name": name, "nodes": nodes, "links": [{"a": "one", "b": "two"}]}
    path.write_text(yaml.safe_dump(document))
    return path


def composed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, *line: str
) -> dict[str, object]:
    """What the command would run with."""
    monkeypatch.setattr(sys, "argv", ["autosync", verb, *line, "--cfg", "job"])
    cli.main()
    found: dict[str, object] = yaml.safe_load(capsys.readouterr().out)
    return found


def options(folder: Path) -> dict[str, str]:
    return {path.stem: yaml.safe_load(path.read_text())["name"] for path in (folder / "cluster").iterdir()}


def test_two_files_of_one_name_are_two_options(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    one, other = (cluster_file(tmp_path / place / "net.yaml", place) for place in ("a", "b"))
    arguments = prepared(["-m", f"cluster={one},{other},one_node"], folder)
    assert arguments == ["-m", "cluster=a_net,b_net,one_node", "--config-dir", str(folder)]
    assert options(folder) == {"a_net": "a", "b_net": "b"}


def test_as_many_folders_as_tell_files_apart_are_in_their_names(tmp_path: Path) -> None:
    places = ("x y/net", "z/net", "z/other", "w/z/net")
    paths = [cluster_file(tmp_path / f"{place}.yaml", place) for place in places]
    line, *_ = prepared([f"cluster={','.join(map(str, paths))}"], tmp_path)
    assert line.removeprefix("cluster=").split(",") == ["x_y_net", f"{tmp_path.name}_z_net", "other", "w_z_net"]


@pytest.mark.parametrize("stem", ["my(1)", "café", "a#b", "a&b", "it's", "a b"])
def test_characters_that_hydra_would_interpret_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stem: str
) -> None:
    path = cluster_file(tmp_path / f"{stem}.yaml", "mine")
    found = composed(monkeypatch, capsys, "predict", f"cluster={path}")
    assert isinstance(found["cluster"], dict)
    assert found["cluster"]["name"] == "mine"


def test_one_file_given_in_two_ways_is_one_option(tmp_path: Path) -> None:
    path = cluster_file(tmp_path / "net.yaml", "mine")
    assert prepared([f"cluster={path},{tmp_path}/./net.yaml"], tmp_path)[0] == "cluster=net,net"


def test_files_that_no_folder_tells_apart_are_refused(tmp_path: Path) -> None:
    one = cluster_file(tmp_path / "net.yaml", "one")
    other = cluster_file(tmp_path / "net.json", "other")
    with pytest.raises(DocumentError, match=r"cluster: .*net\.\w+: another cluster also has the name '.*net'"):
        prepared([f"cluster={one},{other}"], tmp_path)


def test_a_file_with_the_name_of_a_shipped_cluster_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cluster_file(tmp_path / "fat_node_star.yaml", "mine")
    found = composed(monkeypatch, capsys, "predict", f"cluster={path}")
    assert isinstance(found["cluster"], dict)
    assert found["cluster"]["name"] == "mine"


@pytest.mark.parametrize("own", [True, False])
def test_options_are_found_in_every_directory(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, group in (("it's one", "model"), ("two", "ddp")):
        (tmp_path / place / group).mkdir(parents=True)
        (tmp_path / place / group / "of_mine.yaml").write_text(f"place: {place}")
    cluster_file(tmp_path / "net.yaml", "mine")
    line = ["--config-dir", "it's one", f"--config-dir={tmp_path / 'two'}", "model=of_mine", "ddp=of_mine"]
    found = composed(monkeypatch, capsys, "bench", *line, *(["cluster=net.yaml"] if own else []))
    assert (found["model"], found["ddp"]) == ({"place": "it's one"}, {"place": "two"})
    assert (found["cluster"] is not None) == own


def test_a_sweep_by_torchrun_takes_a_file_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cluster_file(tmp_path / "net.yaml", "mine")
    lines: list[list[str]] = []
    monkeypatch.setattr(cli, "_run", lambda verb, composed: lines.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["autosync", "bench", "-m", "rounds=1,2", f"cluster={path}", cli.TORCHRUN])
    cli.main()
    (line,) = lines
    found = get_args_parser().parse_args(line)
    program = "hydra.launcher.program=[-m,lightning_autosync.cli,bench]"
    assert set(found.overrides) == {"rounds=1,2", "cluster=net", cli.TORCHRUN, program}
    assert found.multirun


def test_one_directory_is_left_to_hydra() -> None:
    assert prepared(["--config-dir", "somewhere", "rounds=3"], Path()) == ["--config-dir", "somewhere", "rounds=3"]


def test_directories_that_cannot_be_searched_are_refused(tmp_path: Path) -> None:
    several = ["--config-dir", str(tmp_path), "-cd", str(tmp_path)]
    with pytest.raises(DocumentError, match=r"^--config-dir: directory nowhere does not exist$"):
        prepared([*several, "--config-dir=nowhere"], tmp_path)
    with pytest.raises(DocumentError, match=r"^--config-dir: given several times and with hydra\.searchpath; add"):
        prepared([*several, "hydra.searchpath=[file:///nowhere]"], tmp_path)


def test_an_old_name_of_a_key_is_replaced_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_autosync.cli.arguments.RENAMED_KEYS", {"tune": {"trial.least": "trial.min_steps"}})
    line = ["-m", "trial.least=3,4", "++trial.least=5", "~trial.least", "trial.least_of_all=1"]
    expected = ["-m", "trial.min_steps=3,4", "++trial.min_steps=5", "~trial.min_steps", "trial.least_of_all=1"]
    assert with_todays_keys("tune", line) == expected
    told = "autosync tune: trial.least is now called trial.min_steps; a later release will drop the old name\n"
    assert capsys.readouterr().err == 3 * told
    assert with_todays_keys("bench", line) == line


def test_every_renamed_key_is_one_that_its_class_knows_by_both_names() -> None:
    known = {"trial": TrialSettings, "search": SearchSettings}
    for old, new in RENAMED_KEYS["tune"].items():
        group, _, name = old.partition(".")
        assert f"{group}.{known[group].RENAMED[name]}" == new
        check_overrides("tune", [f"{new}=3"])
    assert sum(len(one.RENAMED) for one in known.values()) == len(RENAMED_KEYS["tune"])
