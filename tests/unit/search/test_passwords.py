"""Passwords of databases are in no file that a run leaves, in no message, and in no command line of a child."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from lightning_autosync.search.passwords import (
    VARIABLE,
    has_password,
    hide_passwords,
    without_password,
    without_passwords,
)
from lightning_autosync.search.storages import StudyError, open_storage

SECRET = "hunter2%40x"
ADDRESSES = [
    f"postgresql://user:{SECRET}@host/db",
    f"postgresql+psycopg2://user:{SECRET}@host:5432/db?sslmode=require",
    f"postgresql://user:a/{SECRET}@host/db",
    f"postgresql://host/db?user=me&password={SECRET}",
    f"mysql://host/db?passwd={SECRET}&charset=utf8",
]
VERB = """
import json, sys
from pathlib import Path

def tune(configuration, directory):
    storage = configuration["study"]["storage"]
    assert storage == "PLAIN" or "hunter2" in storage, storage
    (directory / "argv.json").write_text(json.dumps(sys.argv))
    return 1.0
"""
RUN = """
import sys
import verb
from lightning_autosync.cli.application import main
sys.modules["lightning_autosync.cli.tune"] = verb
main()
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(VARIABLE)]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize(
    "form",
    [
        "study.storage={}",
        "study.storage='{}'",
        'study.storage="{}"',
        "study={{name: x, storage: '{}'}}",
        "++a.b=[x,'{}']",
    ],
)
def test_an_address_with_a_password_goes_by_the_environment(address, form):
    (told,) = hide_passwords([form.format(address)])
    assert SECRET not in told
    assert f"${{oc.env:{VARIABLE}1}}" in told
    assert os.environ[f"{VARIABLE}1"] == address


def test_what_holds_no_password_stays_as_it_is():
    line = ["study.storage=sqlite:///x.db", "a=postgresql://user@host/db", "b='${oc.env:DB}'", "-m", "c=1,2"]
    assert hide_passwords(line) == line


def test_each_address_of_a_sweep_has_a_variable():
    (told,) = hide_passwords([f"study.storage={ADDRESSES[0]},sqlite:///x.db,'{ADDRESSES[2]}'"])
    assert told == f"study.storage='${{oc.env:{VARIABLE}1}}',sqlite:///x.db,'${{oc.env:{VARIABLE}2}}'"


def test_variables_that_exist_are_kept(monkeypatch):
    for number, address in ((2, ADDRESSES[1]), (3, ADDRESSES[1])):
        monkeypatch.setenv(f"{VARIABLE}{number}", address)
    told = hide_passwords([f"a={address}" for address in (ADDRESSES[0], ADDRESSES[2], ADDRESSES[3])])
    assert re.findall(rf"{VARIABLE}(\d+)", " ".join(told)) == ["1", "4", "5"]
    assert os.environ[f"{VARIABLE}2"] == os.environ[f"{VARIABLE}3"] == ADDRESSES[1]


@pytest.mark.parametrize(
    ("address", "literal"),
    [
        ("postgresql://u:hunter2@${oc.env:HOST}/db", ["hunter2"]),
        ("postgresql://${user}:hunter2@${oc.env:HOST,'h'}/db", ["hunter2"]),
        ("postgresql://u:hunter2${oc.env:${name}}x@host/db", ["hunter2", "x"]),
        ("postgresql://${oc.env:HOST}/db?user=u&password=hunter2", ["hunter2"]),
    ],
)
@pytest.mark.parametrize("quoted", [True, False])
def test_a_password_beside_interpolations_goes_by_the_environment(address, literal, quoted):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = "'{}'".format(address.replace("'", "\\'")) if quoted else address
    (told,) = hide_passwords([f"study.storage={given}"])
    assert "hunter2" not in told
    value = OverridesParser.create().parse_override(told).value()
    for number, part in reversed(list(enumerate(reversed(literal), 1))):
        assert os.environ[f"{VARIABLE}{number}"] == part
        value = value.replace(f"${{oc.env:{VARIABLE}{number}}}", part)
    assert value == address


def test_a_password_that_is_an_interpolation_stays_as_it_is():
    line = [
        "a='postgresql://u:${oc.env:PASSWORD}@${oc.env:HOST}/db'",
        "b='postgresql://${oc.env:HOST}:5432/db'",
        "c='postgresql://u@${oc.env:HOST}:5432/db'",
        "d='postgresql://${oc.env:HOST}/db?password=${secret}'",
    ]
    assert hide_passwords(line) == line


def test_a_sweeper_keeps_its_own_password_in_any_application():
    from omegaconf import OmegaConf

    from hydra_plugins.autosync.sweeper import _hide_passwords

    given = f"hydra.sweeper.storage={ADDRESSES[0]}"
    config = OmegaConf.create({"hydra": {"sweeper": {"storage": ADDRESSES[0]}, "overrides": {"hydra": [given]}}})
    _hide_passwords(config)
    assert SECRET not in OmegaConf.to_yaml(config)
    assert config.hydra.sweeper.storage == ADDRESSES[0]


def test_punctuation_behind_an_address_stays():
    address = "mysql://me:%s@host/studies"
    text = f"storage: ('{address}'): {address}: cannot be opened, {address}."
    assert without_passwords(text % ((SECRET,) * 3)) == text % (("***",) * 3)


def test_punctuation_may_be_the_end_of_a_password():
    found = without_passwords("postgresql://host/studies?user=me&password=hunter2!?")
    assert found == "postgresql://host/studies?password=***&user=me"


@pytest.mark.parametrize("address", ADDRESSES)
def test_messages_show_no_password(address):
    assert has_password(address)
    assert not has_password(without_password(address).replace("***", ""))
    assert SECRET not in without_passwords(f"study: (got '{address}') is wrong, {address}")
    with pytest.raises(StudyError) as caught:
        open_storage(f"no{address}")
    assert SECRET not in str(caught.value)


def run(folder: Path, *line: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "verb.py").write_text(VERB)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    surroundings = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    command = [sys.executable, "-c", RUN, "tune", *line]
    return forked.run(command, cwd=folder, env=surroundings, capture_output=True, timeout=120)


def assert_hidden(folder: Path, finished: subprocess.CompletedProcess[str]) -> None:
    left = {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.stem.split(".")[0] != "verb"
    }
    assert any(path.name == "config.yaml" for path in left)
    assert [str(path) for path, content in left.items() if b"hunter2" in content and path.suffix != ".db"] == []
    assert "hunter2" not in finished.stdout + finished.stderr


def test_a_run_leaves_no_password(tmp_path):
    finished = run(tmp_path, f"study.storage={ADDRESSES[0]}", "hydra.run.dir=run")
    assert finished.returncode == 0, finished.stderr
    assert_hidden(tmp_path, finished)


def test_an_interpolation_is_left_as_it_is(tmp_path):
    line = ("study.storage='${oc.env:DATABASE}'", "hydra.run.dir=run")
    finished = run(tmp_path, *line, environment={"DATABASE": ADDRESSES[1]})
    assert finished.returncode == 0, finished.stderr
    assert_hidden(tmp_path, finished)
    assert "${oc.env:DATABASE}" in (tmp_path / "run" / ".hydra" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_sweep_leaves_no_password(tmp_path):
    own = f"sqlite:///file:{tmp_path}/sweep.db?uri=true&password={SECRET}"
    line = ("-m", f"study.storage='{ADDRESSES[0]}',PLAIN", f"hydra.sweeper.storage='{own}'", "hydra.sweep.dir=sweep")
    finished = run(tmp_path, *line)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "sweep" / "multirun.yaml").exists()
    assert_hidden(tmp_path, finished)


def test_a_password_beside_an_interpolation_is_in_no_file(tmp_path):
    address = f"postgresql://u:{SECRET}@${{oc.env:HOST}}/db"
    finished = run(tmp_path, f"study.storage='{address}'", "hydra.run.dir=run", environment={"HOST": "h"})
    assert finished.returncode == 0, finished.stderr
    assert_hidden(tmp_path, finished)


@pytest.mark.parametrize("way", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
@pytest.mark.parametrize("address", [ADDRESSES[0], f"postgresql://u:{SECRET}@${{oc.env:HOST}}/db"])
def test_a_password_in_a_file_of_options_is_refused(tmp_path, address, way):
    file = tmp_path / "options" / "my" / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\nstudy: {{name: x, storage: '{address}'}}\n")
    line = ("+my=own", "hydra.run.dir=run")
    finished = run(tmp_path, *line, way.format(file.parent.parent), environment={"HOST": "h"})
    assert finished.returncode != 0
    assert f"{file}: study.storage: the address contains a password" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert "hunter2" not in finished.stdout + finished.stderr
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_is_said_without_a_password(tmp_path):
    for wrong in (f"study={ADDRESSES[0]}", f"study.storag={ADDRESSES[2]}"):
        finished = run(tmp_path, wrong, "hydra.run.dir=run")
        assert finished.returncode != 0
        assert "hunter2" not in finished.stdout + finished.stderr
