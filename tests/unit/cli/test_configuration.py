"""What the command line says of wrong keys, and its help."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from omegaconf import OmegaConf
from sweeps import crossed

from lightning_autosync.cli.application import VERBS, main
from lightning_autosync.cli.arguments import prepared
from lightning_autosync.cli.configuration import WIDTH, check_overrides, help_text, options_of
from lightning_autosync.cluster import configuration_directory
from lightning_autosync.errors import DocumentError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("speed=1", r"speed: unknown key; allowed: cluster, cluster_fastest, .*warm_up$"),
        ("modell=flat", r"^modell: unknown key; did you mean model\? allowed: .*model"),
        ("dpd.bucket_cap_mb=1", r"^dpd.bucket_cap_mb: unknown key; did you mean ddp\? allowed: "),
        ("lunch=local", r"^lunch: unknown key; did you mean launch\? allowed: "),
        ("shape=fat_node_sta", r"^shape: unknown key; did you mean cluster=fat_node_star\? allowed: "),
        ("cluster=fat_node_star cluster.nmae=x", r"^cluster.nmae: unknown key; did you mean cluster.name\? allowed"),
        ("cluster=fat_node_star cluster.xyz=1", r"^cluster.xyz: unknown key; allowed in cluster: "),
        ("cluster.xyz=1", r"^cluster.xyz: no option of cluster is chosen, .* give cluster=OPTION, and then clus"),
        ("model.speed=1", r"model.speed: unknown key; allowed in model: batch, kind, tensors, width$"),
        ("model=flat model.speed=1", r"model.speed: unknown key; allowed in model: kind, mib$"),
        (
            "model=imported model._target_=a.B model.data._target_=a.C",
            r"model.data has no keys yet; .*\+model.data._",
        ),
        ("rounds.x=1", r"^rounds.x: unknown key; allowed: "),
        (
            "hydra.rum.dir=x",
            r"^hydra.rum.dir: unknown key; did you mean hydra.run\? 'autosync bench --cfg hydra' lists",
        ),
        ("hydra.job.zzz=1", r"^hydra.job.zzz: unknown key; 'autosync bench --cfg hydra' lists the keys of Hydra$"),
        ("ddp.buckets.first=1", r"first: unknown key; did you mean ddp.bucket_cap_mb\? allowed in ddp: bucket_cap_mb"),
        (
            "contenders.new.builder=ps",
            r"unknown key; allowed in contenders: native; to add one, write \+contenders.new",
        ),
        ("model=foo", r"model: 'foo' is not known; allowed: .*digits, .*vgg_like$"),
        ("cluster=foo", r"cluster: 'foo' is not known; allowed: .*fat_node_star, .*two_sites_wan$"),
        ("cluster=two_rack", r"^cluster: 'two_rack' is not known; did you mean 'two_racks_\dto1' or .*\? allowed: .*"),
        ("ddp=shrot", r"^ddp: 'shrot' is not known; did you mean 'short'\? allowed: "),
        ("experiment=foo", r"experiment: 'foo' is not known; allowed: .*fat_star_4"),
        ("model=flat,foo", r"model: 'foo' is not known"),
        ("rounds=3,4 model=flat,foo", r"model: 'foo' is not known"),
        ("+rounds=3", r"rounds: key exists already; leave out the \+$"),
        ("rounds", r"'rounds': not of the form key=value"),
        ("hydra.sweeper.n_trials=x", r"^'hydra\.sweeper\.n_trials=x': Value 'x' .*could not be converted to Integer$"),
    ],
)
def test_one_line_names_the_key_and_what_is_allowed(line: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message) as caught:
        check_overrides("bench", ["-m", *line.split(" ")])
    assert "\n" not in str(caught.value)


def test_what_is_empty_can_be_added_to() -> None:
    for key in ("arguments.topology", "arguments.compressor.kind"):
        with pytest.raises(DocumentError) as caught:
            check_overrides("predict", [f"{key}=ring"])
        said = f"{key}: arguments has no keys yet; to add this one, write +{key}=..."
        assert str(caught.value) == said


def test_a_verb_that_is_interrupted_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(verb: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_autosync.cli.application.run_verb", interrupted)
    monkeypatch.setattr(sys, "argv", ["autosync", "fit"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "autosync fit: interrupted\n"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "model=flat,digits rounds=3",
        "ddp.bucket_cap_mb=[default,1] hydra.run.dir=run",
        "+contenders.star.builder=ps",
        "experiment=matrix",
        "--config-dir somewhere model=of_my_own",
        "cluster_scale=interval(0.5,1) rounds=range(3,5) cluster=one_node",
        pytest.param("model=glob(*_like) cluster=one_node", marks=pytest.mark.slow),
    ],
)
def test_what_hydra_takes_is_let_through(line: str) -> None:
    check_overrides("bench", line.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--wrong",
            r"'--wrong': no such option; give key=value: 'autosync bench --help' lists the keys, and "
            r"'autosync bench --hydra-help' the options",
        ),
        ("-m --multirn rounds=3", r"'--multirn': no such option; did you mean --multirun\?"),
        ("--hepl", r"'--hepl': no such option; did you mean --help\?"),
        ("-rouds=3", r"'-rouds=3': no such option; did you mean rounds=3\?"),
        ("-m -modle=vgg,flat", r"'-modle=vgg,flat': no such option; did you mean model=vgg,flat\?"),
        ("-multirn rounds=3", r"'-multirn': no such option; did you mean --multirun\?"),
        ("-cfg nothing", r"'-cfg': no such option; did you mean --cfg\?"),
        ("--cfg nothing", r"--cfg/-c: invalid choice: 'nothing' .*"),
        ("--ronds=3", r"'--ronds=3': no such option; did you mean rounds=3\?"),
        ("--contender ps", r"'--contender': no such option; did you mean contenders=VALUE\?"),
        ("--config-dir", r"--config-dir/-cd: expected one argument"),
        ("rounds=3 -m model=flat", r"'model=flat': give all words of the form key=value side by side.*"),
    ],
)
def test_options_that_do_not_exist_are_told_in_one_line(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autosync", "bench", *line.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert re.fullmatch(f"autosync bench: {message}\n", capsys.readouterr().err)


@pytest.mark.parametrize(("wrong", "meant"), [("predct", "predict"), ("--hepl", "--help")])
def test_a_verb_that_is_nearly_one_is_named(
    wrong: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autosync", wrong])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = f"autosync: '{wrong}' is not a subcommand; did you mean '{meant}'? autosync --help lists them\n"
    assert capsys.readouterr().err == told


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["autosync", "--version"])
    main()
    assert capsys.readouterr().out == f"autosync {version('lightning-autosync')}\n"


def test_the_value_of_an_unknown_group_names_the_group() -> None:
    with pytest.raises(DocumentError, match=r"^sampler: unknown key; did you mean search=tpe\? allowed: "):
        check_overrides("tune", ["sampler=tpee"])


def test_values_in_braces_do_not_replace_a_cluster() -> None:
    told = r"^cluster={\.\.\.}: values in braces cannot replace an option .*; give cluster=FILE, .* cluster=OPTION"
    with pytest.raises(DocumentError, match=told) as caught:
        check_overrides("bench", ["experiment=fat_star_4", "cluster={name: mine, nodes: [{name: a}]}"])
    assert "\n" not in str(caught.value)


def test_values_in_braces_do_not_replace_an_option_of_another_group() -> None:
    with pytest.raises(DocumentError, match=r"; give model=OPTION and then model.KEY=VALUE$"):
        check_overrides("bench", ["model={name: mine}"])


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [10.0])])
def test_of_each_host_the_first_rank_tells_what_is_wrong(
    rank: str, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for their launcher to end them, and tell it if that does not happen."""
    waited: list[float] = []
    monkeypatch.setattr("lightning_autosync.cli.application.time.sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(sys, "argv", ["autosync", "bench", "cluster=missing.yaml"])
    with pytest.raises(SystemExit, match=r"^autosync bench: cluster: file missing\.yaml does not exist"):
        main()
    assert waited == waits


@pytest.mark.parametrize("line", ["cluster=missing.yaml", "speed=1"], ids=["verb", "keys"])
def test_a_rank_that_waits_to_be_ended_can_be_interrupted(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_autosync.cli.application.time.sleep", interrupted)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["autosync", "bench", line])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:  # pytest itself would end at the latter
        main()
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == 130
    assert capsys.readouterr().err == "autosync bench: interrupted\n"


def test_the_command_ends_with_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["autosync", "bench", "speed=1"])
    with pytest.raises(SystemExit, match=r"^autosync bench: speed: unknown key; allowed: "):
        main()


def test_help_has_every_option_and_every_key_with_its_meaning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autosync", "bench", "--help"])
    main()
    told = capsys.readouterr().out
    for option in (configuration_directory() / "model").glob("*.yaml"):
        assert f"\n  {option.stem} " in told
    assert "rounds: 5                 # in each round, every contender has one turn" in told
    assert "model=OPTION (default: layers60)" in told
    assert "hydra:" not in told


@pytest.mark.parametrize("line", ["bench --help", "--help"])
def test_help_of_which_nothing_is_read_ends_silently(line: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        command = [sys.executable, "-m", "lightning_autosync.cli", *line.split()]
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_tables_of_which_nothing_is_read_end_silently(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        command = [sys.executable, "-m", "lightning_autosync.cli", "cache"]
        environment = {**os.environ, "LIGHTNING_AUTOSYNC_CACHE": str(tmp_path)}
        ended = forked.run(command, stdout=closed, stderr=subprocess.PIPE, cwd=tmp_path, env=environment)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_all_of_each_option(verb: str) -> None:
    told = help_text(verb, VERBS[verb])
    data = yaml.safe_load((configuration_directory() / f"{verb}.yaml").read_text())
    groups = [group for entry in data.get("defaults", []) if isinstance(entry, dict) for group in entry]
    for group in (group for group in groups if not group.startswith("override ")):
        for option in options_of(verb, group):
            comments = (configuration_directory() / group / f"{option}.yaml").read_text().splitlines()
            remark = next(line[2:] for line in comments if line.startswith("# ") and not line.startswith("# @"))
            assert re.sub(r"^\(\w+(, \w+)*\) ", "", remark) in " ".join(told.split()), option


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    assert f"usage: autosync {verb} key=value" in help_text(verb, VERBS[verb][1])


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_where_outputs_go_and_where_the_verb_runs(verb: str) -> None:
    *_, end = help_text(verb, VERBS[verb]).split("\n\n")
    assert max(map(len, end.splitlines())) <= WIDTH
    if verb == "cache":
        assert "leaves no files" in end
    else:
        folder = "DATE/TIME-RANK" if verb == "serve" else "DATE/TIME"
        assert f"Outputs go to outputs/{verb}/{folder}, with the log {verb}.log; hydra.run.dir=DIR names" in end
        assert "\nFiles: " in end
    launches = set(re.findall(r"launch=(\w+)", end))
    groups = yaml.safe_load((configuration_directory() / f"{verb}.yaml").read_text())["defaults"]
    if any(isinstance(entry, dict) and "launch" in entry for entry in groups):
        assert launches == set(options_of(verb, "launch"))
    else:
        assert not launches
        assert re.search(r"It runs (in this process|on this machine)|Ranks run on this machine", end)


def _colliding() -> list[tuple[str, str]]:
    """Keys of verbs that are groups of other verbs, so that Hydra takes KEY=VALUE for an option."""
    groups = [path.name for path in configuration_directory().iterdir() if path.is_dir()]
    found = []
    for verb in VERBS:
        data = yaml.safe_load((configuration_directory() / f"{verb}.yaml").read_text())
        own = {name for entry in data["defaults"] if isinstance(entry, dict) for name in entry}
        found += [(verb, name) for name in groups if name in data and name not in own]
    return found


def test_no_message_says_that_a_key_is_unknown_and_allowed() -> None:
    assert ("tune", "contenders") in _colliding()
    for verb, key in _colliding():
        with pytest.raises(DocumentError) as caught:
            check_overrides(verb, [f"{key}=something"])
        assert (
            str(caught.value) == f"{key}: takes no options for {verb}, but keys and values; set one by +{key}.KEY=VALUE"
        )


def test_predict_takes_models_of_the_bench_and_names_the_key_of_others() -> None:
    check_overrides("predict", ["model=vgg_like"])
    check_overrides("predict", ["+model.batch_size=64"])
    check_overrides("predict", ["model@module=perceptron", "plan=plan.yaml"])
    with pytest.raises(DocumentError, match=r"^model: 'resnet50' is not known; allowed: .*; .*give workload=resnet50$"):
        check_overrides("predict", ["model=resnet50"])
    with pytest.raises(DocumentError, match=r"^model: 'alexnet' is not known; allowed: [^;]*$"):
        check_overrides("predict", ["model=alexnet"])


CLUSTER = "format: autosync-cluster/1\nname: {name}\nuniform: {{nodes: 2}}\n"


def test_a_file_of_a_cluster_becomes_an_option(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(CLUSTER.format(name="mine"))
    folder = tmp_path / "found"
    folder.mkdir()
    arguments = ["-m", f"cluster={tmp_path}/mine.yaml,one_node", "ranks=2"]
    expected = ["-m", "cluster=mine,one_node", "ranks=2", "--config-dir", str(folder)]
    assert prepared(arguments, folder) == expected
    found = yaml.safe_load((folder / "cluster" / "mine.yaml").read_text())
    assert found == {"format": "autosync-cluster/1", "name": "mine", "uniform": {"nodes": 2}}
    assert prepared(["cluster=one_node"], folder) == ["cluster=one_node"]
    with pytest.raises(DocumentError, match=r"cluster: file other\.yaml does not exist"):
        prepared(["cluster=other.yaml"], folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--config-dir options model=of_my_ow",
            r"model: 'of_my_ow' is not known; did you mean 'of_my_own'\? allowed: ",
        ),
        ("--config-dir options --config-dir more model.scal=1", r"model\.scal: "),
        ("model=vgg_lik", r"model: 'vgg_lik' is not known; did you mean 'vgg_like' or .*\? allowed: "),
        ("model=vgg_like model.scal=1", r"model\.scal: unknown key; did you mean model\.scale\? allowed in model: "),
        ("cluster_fastest=400Mbit/s", r"cluster_fastest: unknown key; did you mean cluster\? allowed: "),
        ("cluster.nmae=x", r"cluster\.nmae: unknown key; did you mean cluster\.name\? allowed in cluster: "),
    ],
)
def test_beside_a_file_of_a_cluster_one_line_names_the_key(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(CLUSTER.format(name="mine"))
    (tmp_path / "more").mkdir()
    (tmp_path / "options" / "model").mkdir(parents=True)
    (tmp_path / "options" / "model" / "of_my_own.yaml").write_text("kind: flat\nmib: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autosync", "predict", *words.split(), f"cluster={tmp_path}/mine.yaml"])
    with pytest.raises(SystemExit, match=f"^autosync predict: {message}") as caught:
        main()
    assert "\n" not in str(caught.value.code)


def test_an_option_of_a_directory_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "of_mine.yaml").write_text("kind: flat\nmib: 1\n")
    check_overrides("bench", ["--config-dir", str(tmp_path), "model=of_mine", "model.mib=2"])
    with pytest.raises(DocumentError, match=r"^model\.mob: unknown key; did you mean model\.mib\?"):
        check_overrides("bench", ["--config-dir", str(tmp_path), "model=of_mine", "model.mob=2"])


def test_a_file_of_a_cluster_with_a_slow_rate_without_a_unit_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("format: autosync-cluster/1\nname: mine\nuniform: {nodes: 2, bandwidth: 400}\n")
    with pytest.warns(UserWarning, match=f"^{path}: uniform.bandwidth: 400 is 400 bytes/s; write '400 Mbit/s'"):
        prepared([f"cluster={path}"], tmp_path / "found")


def test_warnings_of_the_package_are_lines(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("format: autosync-cluster/1\nname: mine\nuniform: {nodes: 2, bandwidth: 400}\n")
    monkeypatch.setattr(sys, "argv", ["autosync", "predict", f"cluster={path}", "wrong=1"])
    with pytest.raises(SystemExit):
        main()
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"autosync predict: {path}: uniform.bandwidth: 400 is 400 bytes/s; write ")


def test_a_file_of_a_cluster_gives_values_and_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    harmful = tmp_path / "harmful.yaml"
    harmful.write_text(
        "# @package _global_\n"
        "hydra:\n  callbacks:\n    own:\n      _target_: subprocess.run\n"
        f"      args: [touch, {trap}]\n" + CLUSTER.format(name="harmful")
    )
    command = [sys.executable, "-m", "lightning_autosync.cli", "predict", f"cluster={harmful}", "plan=all_reduce"]
    ended = forked.run(command, capture_output=True, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"autosync predict: {harmful}: hydra: unknown field; allowed: name, ")
    assert ended.stderr.endswith(" (line 2)\n")
    assert not trap.exists()


LINES = ["cluster={}", "+cluster={}", "cluster='{}.yaml'", 'cluster="{}"', "cluster=[{}]", "cluster@a={}.yml"]


@pytest.mark.parametrize(("line", "path"), crossed(LINES, ["../../elsewhere/harmful", "/elsewhere/harmful"]))
def test_hydra_follows_no_path_of_a_cluster(tmp_path: Path, line: str, path: str) -> None:
    for argument in (line.format(path), f"{line.format('one_node')},{path}"):
        with pytest.raises(DocumentError, match=r"harmful.*: a path is not allowed here; give cluster=FILE"):
            prepared(["-m", argument], tmp_path)


@pytest.mark.parametrize("name", ["${hydra:runtime.cwd}", "a\\\\${b}", "${oc.env:HOME}", "$x {y}"])
def test_nothing_in_a_file_of_a_cluster_is_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({**yaml.safe_load(CLUSTER.format(name="x")), "name": name}))
    folder = tmp_path / "found"
    folder.mkdir()
    prepared([f"cluster={tmp_path}/mine.json"], folder)
    composed = OmegaConf.load(folder / "cluster" / "mine.yaml")
    assert OmegaConf.to_container(composed, resolve=True)["name"] == name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00", "cannot be read: 'utf-8' codec can't decode"),
        (b"name: [1, 2\nb", "not valid YAML: .* at line 2"),
        (b"- one\n- two\n", "expected a mapping of fields, got list"),
        (
            b"format: autosync-cluster/1\nname: ${b}\nuniform: {nodes: 10000000}",
            "uniform.nodes: .* 4096 .*\\(line 3\\)",
        ),
    ],
)
def test_errors_name_the_users_own_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    folder = tmp_path / "found"
    folder.mkdir()
    with pytest.raises(DocumentError, match=f"^{path}: {words}"):
        prepared([f"cluster={path}"], folder)
    (tmp_path / "one_node.yaml").write_bytes(content)  # the name of an option: it becomes one of another name
    with pytest.raises(DocumentError, match=f"^{tmp_path}/one_node.yaml: {words}"):
        prepared([f"cluster={tmp_path}/one_node.yaml"], folder)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(DocumentError, match="port, rank, size: missing"):
        check_overrides("serve", [])


@pytest.mark.parametrize("line", [["--cfg", "job"], ["-c", "job"], ["--cfg=job"]])
def test_a_configuration_is_printed_without_the_keys_that_a_run_needs(line: list[str]) -> None:
    check_overrides("serve", line)


@pytest.mark.parametrize("verb", ["predict", "bench", "probe"])
def test_clusters_that_ship_can_be_named(verb: str) -> None:
    check_overrides(verb, ["cluster=two_racks_8to1"])
    with pytest.raises(DocumentError, match="cluster: 'nowhere' is not known; allowed: autosync_a"):
        check_overrides(verb, ["cluster=nowhere"])


def test_a_cluster_where_there_is_none_is_an_unknown_key() -> None:
    with pytest.raises(DocumentError, match=r"^cluster: unknown key; did you mean clusters\? allowed: "):
        check_overrides("validate", ["cluster=one_node"])


EXPERIMENTS = sorted(path.stem for path in (configuration_directory() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_for_one_verb_and_listed_by_it_alone(experiment: str) -> None:
    remark = (configuration_directory() / "experiment" / f"{experiment}.yaml").read_text().splitlines()[1]
    (verb,) = re.findall(r"^# \((\w+)\) ", remark)
    check_overrides(verb, [f"experiment={experiment}"])
    for other in ("bench", "converge", "train"):
        assert (f"\n  {experiment} " in told(other)) == (other == verb)


@cache
def told(verb: str) -> str:
    return help_text(verb, "")


def test_an_option_of_another_verb_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"^experiment: 'fat_star_4' is only for bench; allowed: convergence, isol"):
        check_overrides("converge", ["experiment=fat_star_4"])
    with pytest.raises(
        DocumentError, match=r"^launch: 'torchrun' is only for .*; allowed: emulated, local, ray, slurm, ssh$"
    ):
        check_overrides("bench", ["launch=torchrun"])
    with pytest.raises(DocumentError, match=r"^experiment: 'stragglers' is only for converge"):
        check_overrides("bench", ["-m", "experiment=fat_star_4,stragglers"])
