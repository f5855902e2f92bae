"""Runs that may split operators, in several sessions: what they keep, what they compare, and how they end."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState
from priced_session import PricedSession
from test_tuning_hybrid import hybrid_configuration, hybrid_run
from test_tuning_interruptions import heard_ctrl_c as heard_ctrl_c

from lightning_autosync.cli.tune import Interrupted, tune
from lightning_autosync.errors import TuningError, UnwritableError
from lightning_autosync.hybrid import HybridPlan
from lightning_autosync.hybrid.rates import HybridRates
from lightning_autosync.measure.workers import LaunchError
from lightning_autosync.search.hybrid import run as hybrid_runs
from lightning_autosync.search.hybrid.result import HybridTrial, read_hybrid_result
from lightning_autosync.search.journal import Journal
from lightning_autosync.search.storages import StorageError, StudyError
from lightning_autosync.search.tuning.job import TuningJob


class Session(PricedSession):
    """Split plans have DDP's gradients. A signal may come while the workers end."""

    signalled = False

    def call(self, *asked: Any, **named: Any) -> list[float]:
        return [0.0, 0.0]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.signalled:
            signal.raise_signal(signal.SIGINT)


def price(name: str, order: Mapping[str, Any]) -> float:
    return 0.4 if "ddp" in order else 0.1 if "hybrid" in order else 0.2


def ctrl_c_at_split_plans(name: str, order: Mapping[str, Any]) -> float:
    if "hybrid" in order:
        raise KeyboardInterrupt
    return price(name, order)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Runs have priced sessions; of each final comparison, the settings of DDP are noted and nothing is measured."""
    asked: list[Sequence[str]] = []

    def compare(job: Any, session: Any, plans: Any, rivals: Sequence[str], directory: Any) -> None:
        asked.append(rivals)

    monkeypatch.setattr(hybrid_runs, "compare", compare)
    monkeypatch.setattr(TuningJob, "session", lambda self: Session(price))
    return asked


def with_rates(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    HybridRates().save(directory / "rates.yaml")
    return directory


@pytest.mark.usefixtures("compared")
def test_no_file_has_the_password_of_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_runs, "open_plan_storage", lambda address: optuna.storages.InMemoryStorage())
    tune(hybrid_configuration(study={"storage": "postgresql://me:secret@host/db"}), with_rates(tmp_path))
    assert read_hybrid_result(tmp_path).settings["study"]["storage"] == "postgresql://me:***@host/db"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


@pytest.mark.parametrize(
    ("changed", "field"), [({"scheduling": "none"}, "scheduling"), ({"launch": {"kind": "emulated"}}, "launch")]
)
def test_times_of_another_launch_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], field: str
) -> None:
    hybrid_run(None, tmp_path)._open()
    monkeypatch.setattr(TuningJob, "session", None)
    with pytest.raises(StudyError, match=f"{field}: study 'tune' was measured with"):
        hybrid_run(None, tmp_path, **changed).run()


def test_times_of_runs_in_other_directories_do_not_count(tmp_path: Path) -> None:
    shared = {"study": {"storage": str(tmp_path / "shared.journal")}}
    one, other = (hybrid_run(None, with_rates(tmp_path / name), **shared) for name in ("one", "other"))
    for run, seconds in ((one, 0.1), (other, 0.2)):
        run._open().add(HybridTrial(number=0, name="ddp", origin="ddp", state="complete", seconds=seconds), 0)
    found = [(trial.number, trial.seconds) for run in (one, other) for trial in run._open().records()]
    assert found == [(0, 0.1), (1, 0.2)]


def test_a_run_with_a_study_of_its_own_knows_trials_of_any_name(tmp_path: Path) -> None:
    record = HybridTrial(number=0, name="ddp", origin="ddp", state="complete", seconds=0.1)
    hybrid_run(None, tmp_path)._open().add(record, 0)
    (tmp_path / ".identity").unlink()
    assert hybrid_run(None, tmp_path)._open().records() == [record]


def test_a_trial_has_its_own_point_whatever_another_process_has_enqueued(tmp_path: Path) -> None:
    trials = hybrid_run(None, tmp_path)._open()
    trials.study.enqueue_trial({"origin": "ddp", "place": 0})
    trials.add(HybridTrial(number=0, name="split", origin="search", state="complete", seconds=0.1), 3)
    ((trial, record),) = zip(trials.finished(), trials.records(), strict=True)
    assert (trial.params, record.number) == ({"origin": "search", "place": 3}, 1)


def test_only_present_settings_of_ddp_are_compared(tmp_path: Path, compared: list[Sequence[str]]) -> None:
    for sizes in ([1, 5], ["default"]):
        tune(hybrid_configuration(ddp={"bucket_cap_mb": sizes}), with_rates(tmp_path))
    assert [sorted(rivals) for rivals in compared] == [["ddp_1", "ddp_5"], ["ddp"]]


def test_a_plan_over_a_lower_limit_of_memory_is_not_kept(tmp_path: Path) -> None:
    trials = hybrid_run(None, tmp_path)._open()
    for name, memory in (("large", 2e6), ("small", 1e6)):
        trials.add(HybridTrial(number=0, name=name, origin="search", state="complete", seconds=0.1, memory=memory), 0)
    assert [trial.name for trial in hybrid_run(1.5e6, tmp_path)._allowed(trials)] == ["small"]


@pytest.mark.usefixtures("compared")
def test_a_comparison_that_fails_leaves_the_results_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*asked: Any) -> None:
        raise LaunchError("no worker can be started any more")

    monkeypatch.setattr(hybrid_runs, "compare", compare)
    with pytest.raises(TuningError, match="no worker can be started any more; the results so far are saved"):
        tune(hybrid_configuration(), with_rates(tmp_path))
    found = read_hybrid_result(tmp_path)
    assert found.failure == "no worker can be started any more"
    assert HybridPlan.load(tmp_path / "plan.yaml") == found.plan
    assert (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("at", ["hybrid", "ddp"])
def test_a_storage_that_answers_no_more_leaves_the_trials_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def breaking(name: str, order: Mapping[str, Any]) -> float:
        if at in order:
            monkeypatch.setattr(Journal, "append_logs", full)
            monkeypatch.setattr(Journal, "read_logs", full)
        return price(name, order)

    monkeypatch.setattr(TuningJob, "session", lambda self: Session(breaking))
    expected: type[Exception] = TuningError if at == "hybrid" else StorageError
    with pytest.raises(expected, match=r"storage does not answer: OSError: .*No space left"):
        tune(hybrid_configuration(search={"batch": 1}), with_rates(tmp_path))
    assert (tmp_path / "result.json").exists() == (at == "hybrid")
    if at == "hybrid":
        assert {trial.origin for trial in read_hybrid_result(tmp_path).trials} == {"ddp", "builder"}


@pytest.mark.usefixtures("compared", "heard_ctrl_c")
def test_a_second_ctrl_c_waits_until_the_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(ctrl_c_at_split_plans)
    session.signalled = True
    monkeypatch.setattr(TuningJob, "session", lambda self: session)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        tune(hybrid_configuration(search={"batch": 1}), with_rates(tmp_path))
    found = read_hybrid_result(tmp_path)
    assert found.interrupted
    assert found.best is not None
    assert (tmp_path / "plan.yaml").exists()


@pytest.mark.usefixtures("compared")
def test_a_ctrl_c_before_the_first_result_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, order: Mapping[str, Any]) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(TuningJob, "session", lambda self: Session(interrupted))
    with pytest.raises(Interrupted):
        tune(hybrid_configuration(), with_rates(tmp_path))
    assert not (tmp_path / "result.json").exists()
    assert f"the same command with hydra.run.dir={tmp_path}" in capsys.readouterr().out


@pytest.mark.usefixtures("compared")
def test_a_best_plan_that_cannot_be_written_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_rates(tmp_path / "run")
    (run / "plan.yaml").mkdir()  # a folder in place of the file
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UnwritableError, match="the best plan is printed above and saved as") as told:
        tune(hybrid_configuration(), run)
    (place,) = re.findall(r"saved as (\S+)$", str(told.value))
    plan = HybridPlan.load(place)
    printed = capsys.readouterr().out
    assert HybridPlan.from_dict(yaml.safe_load(printed[printed.index("format: autosync-hybrid") :])) == plan
    assert read_hybrid_result(Path(place).parent).plan == plan


@pytest.mark.usefixtures("heard_ctrl_c")
def test_a_ctrl_c_waits_until_a_trial_is_stored_with_its_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = hybrid_run(None, tmp_path)._open()
    create = optuna.storages.JournalStorage.create_new_trial

    def signalled(*given: Any, **named: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return create(*given, **named)

    monkeypatch.setattr(optuna.storages.JournalStorage, "create_new_trial", signalled)
    record = HybridTrial(number=0, name="split", origin="search", state="pruned", seconds=0.1, memory=8.0)
    with pytest.raises(KeyboardInterrupt):
        trials.add(record, 3)
    (stored,) = trials.study.get_trials()
    assert (stored.state, stored.value, stored.params) == (TrialState.PRUNED, 0.1, {"origin": "search", "place": 3})
    assert trials.records() == [record]
