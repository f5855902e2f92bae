"""Studies of plans: what they say of themselves, resuming them, and their trials as samples."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import optuna
import pytest
from clusters import uneven_cluster

from lightning_autosync.errors import DocumentError
from lightning_autosync.plan import builders
from lightning_autosync.plan.space import BUILDER, COMPOSED, PlanSpace
from lightning_autosync.search import storages, studies
from lightning_autosync.search import trial_attributes as attrs
from lightning_autosync.search.sampler.observations import Observations
from lightning_autosync.search.storages import StudyError, storage_errors
from lightning_autosync.search.tuning.samplers import BucketSpace
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(
    name="small",
    variables=(
        Variable(name="front", shape=(64, 9)),
        Variable(name="wide", shape=(200, 30)),
        Variable(name="b", shape=(64,)),
    ),
)
SPACE = PlanSpace(WORKLOAD, uneven_cluster(3))


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def measure(study: optuna.Study, steps: list[list[float]]) -> optuna.Trial:
    trial = study.ask()
    studies.suggest(trial, SPACE)
    trial.set_user_attr(attrs.STEPS, steps)
    study.tell(trial, 2.0)
    return trial


def test_a_study_tells_its_workload_cluster_and_space(storage: Path) -> None:
    studies.open_study(storage, "one", SPACE)
    study = studies.load_study(storage)
    assert studies.workload_of(study) == WORKLOAD
    assert studies.cluster_of(study) == SPACE.cluster
    assert studies.space_of(study).parameters == SPACE.parameters


def test_it_goes_on_with_its_trials(storage: Path) -> None:
    measure(studies.open_study(storage, "one", SPACE), [[2.0, 2.0]])
    again = studies.open_study(str(storage), "one", PlanSpace(WORKLOAD, uneven_cluster(3)))
    assert len(again.trials) == 1


def test_a_database_is_opened_by_url(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    measure(studies.open_study(url, "one", SPACE), [[2.0]])
    assert len(studies.samples_of(studies.load_study(url, "one"))) == 1


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (PlanSpace(WORKLOAD, uneven_cluster(4)), "cluster"),
        (PlanSpace(WORKLOAD, uneven_cluster(3), "compressed"), "semantics"),
        (PlanSpace(WORKLOAD, uneven_cluster(3), runs=1), "space"),
        (PlanSpace(Workload(name="small", variables=WORKLOAD.variables[:2]), uneven_cluster(3)), "workload"),
    ],
)
def test_a_study_of_something_else_is_refused(storage: Path, other: PlanSpace, what: str) -> None:
    studies.open_study(storage, "one", SPACE)
    with pytest.raises(StudyError, match=f"study 'one': it has another {what}"):
        studies.open_study(storage, "one", other)


def made_by_another(storage: Path, described_when_asked: pytest.MonkeyPatch | None) -> optuna.Study:
    """A study as it is between its making and its description, by a process that goes on when somebody waits for it."""
    study = optuna.create_study(storage=storages.open_storage(storage), study_name="one")
    if described_when_asked is not None:
        described_when_asked.setattr(studies.time, "sleep", lambda seconds: studies.describe(study, SPACE))
    return study


def test_of_two_processes_that_begin_at_once_the_maker_says_what_the_study_is_about(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PlanSpace(WORKLOAD, uneven_cluster(4))
    made = made_by_another(storage, monkeypatch)
    with pytest.raises(StudyError, match="study 'one': it has another cluster"):
        studies.open_study(storage, "one", other)
    assert studies.cluster_of(made) == studies.cluster_of(studies.load_study(storage)) == SPACE.cluster
    assert studies.open_study(storage, "one", SPACE).user_attrs == made.user_attrs


def test_a_study_whose_maker_died_before_it_described_it_is_described(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by_another(storage, None)
    monkeypatch.setattr(studies, "_DESCRIBE_TIMEOUT", 0.0)
    assert studies.space_of(studies.open_study(storage, "one", SPACE)).fingerprint == SPACE.fingerprint


def test_other_times_of_the_same_variables_are_told_apart_from_another_model(storage: Path) -> None:
    studies.open_study(storage, "one", SPACE)
    slower = PlanSpace(WORKLOAD.model_copy(update={"backward_time": 1.0}), SPACE.cluster)
    with pytest.raises(StudyError, match=r"another workload .* its variables are the same, but times") as caught:
        studies.open_study(storage, "one", slower)
    assert "\n" not in str(caught.value)


def test_the_same_workload_under_another_name_belongs_to_the_study(storage: Path) -> None:
    studies.open_study(storage, "one", SPACE)
    renamed = PlanSpace(WORKLOAD.model_copy(update={"name": "renamed"}), SPACE.cluster)
    assert studies.workload_of(studies.open_study(storage, "one", renamed)) == WORKLOAD


def test_a_study_that_is_not_of_plans_is_refused(storage: Path) -> None:
    foreign = optuna.create_study(storage=storages.open_storage(storage), study_name="one")
    foreign.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(StudyError, match="its trials are not plans"):
        studies.open_study(storage, "one", SPACE)
    with pytest.raises(StudyError, match="not a study of plans"):
        studies.load_study(storage, "one")


def test_mysql_is_refused_because_its_texts_are_short() -> None:
    with pytest.raises(StudyError, match=r"^mysql\+pymysql://me:\*\*\*@host/db: .*64 KiB of text.*; use PostgreSQL"):
        studies.open_study("mysql+pymysql://me:hunter2@host/db", "one", SPACE)


def test_what_is_not_there_is_named(storage: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="this journal file does not exist"):
        studies.load_study(storage)
    studies.open_study(storage, "one", SPACE)
    with pytest.raises(StudyError, match="no study 'two'; allowed: one"):
        studies.load_study(storage, "two")
    studies.open_study(storage, "two", SPACE)
    with pytest.raises(StudyError, match="it has 2 studies; choose one of"):
        studies.load_study(storage)
    with pytest.raises(StudyError, match="allowed: a URL, or a journal file"):
        studies.open_study(tmp_path / "study.txt", "one", SPACE)
    with pytest.raises(StudyError, match="cannot be opened"):
        studies.open_study("nosuch://host/db", "one", SPACE)


def test_to_read_a_database_that_is_not_there_makes_none(tmp_path: Path) -> None:
    path = tmp_path / "typo.db"
    with pytest.raises(StudyError, match=r"typo\.db: this database does not exist"):
        studies.load_study(f"sqlite:///{path}")
    assert not path.exists()
    with pytest.raises(StudyError, match="cannot be opened"):
        studies.load_study("postgresql://host:port/db")
    path.with_suffix(".there").touch()
    with pytest.raises(StudyError, match="it has 0 studies"):
        studies.load_study(f"sqlite:///file:{path.with_suffix('.there')}?uri=true")


def test_a_line_that_a_killed_process_left_unfinished_is_dropped(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    study.set_user_attr("first", 1)
    with storage.open("ab") as file:
        file.write(b'{"op_code":2,"worker_id":"gone","study_')
    studies.open_study(storage, "one", SPACE).set_user_attr("second", 2)
    found = studies.open_study(storage, "one", SPACE).user_attrs
    assert (found["first"], found["second"]) == (1, 2)


def test_a_damaged_journal_gives_one_error(storage: Path) -> None:
    studies.open_study(storage, "one", SPACE)
    storage.write_text("{broken\n" + storage.read_text())
    with pytest.raises(StudyError, match="cannot be opened"):
        studies.open_study(storage, "one", SPACE)


METHOD = "run0/method"


def earlier(*methods: str) -> PlanSpace:
    """The space as a release made it that had other topologies."""
    return PlanSpace(WORKLOAD, SPACE.cluster, recorded={**SPACE.parameters, METHOD: methods})


def test_a_study_goes_on_with_the_domains_that_it_began_with(storage: Path) -> None:
    began = earlier("native", "star")
    study = studies.open_study(storage, "one", began)
    for number in range(3):
        study.enqueue_trial({BUILDER: COMPOSED, METHOD: "star"})
        trial = study.ask()
        plan = began.plan(studies.suggest(trial, began))
        study.tell(trial, 1.0 + number)
    study = studies.open_study(storage, "one", SPACE)  # today's
    space = studies.space_of(study)
    assert space.parameters == began.parameters
    assert attrs.plan_of(study.get_trials()[-1], space) == plan
    studies.suggest(study.ask(), space)
    study.enqueue_trial({BUILDER: COMPOSED})
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        studies.suggest(study.ask(), SPACE)  # so that this test fails if Optuna ever does


def test_trials_leave_out_what_their_plans_do_not_use(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    servers = {name for name in SPACE.parameters if name.endswith("/servers")}
    assert servers
    native = dict(SPACE.draw(Random(1))) | {name: "native" for name in SPACE.parameters if name.endswith("/method")}
    points = [{**native, BUILDER: COMPOSED}, {**native, BUILDER: "byteps"}, *(SPACE.draw(Random(n)) for n in range(20))]
    left_out = 0
    for point in points:
        study.enqueue_trial(point)
        trial = study.ask()
        suggested = studies.suggest(trial, SPACE)
        assert trial.params == suggested
        assert SPACE.plan(suggested) == SPACE.plan(point)
        assert SPACE.normal(suggested) == SPACE.normal(point)
        left_out += len(SPACE.parameters) - len(suggested)
        study.tell(trial, 1.0)
    assert left_out
    all_reduce, builder = study.trials[:2]
    assert not servers & all_reduce.params.keys()
    assert builder.params == {BUILDER: "byteps"}
    observed = Observations.of(study.trials, SPACE, -1)
    assert [SPACE.normal(choice.point) for _, choice, _ in observed.measured] == [SPACE.normal(one) for one in points]


def test_a_parameter_that_is_used_must_not_be_left_out() -> None:
    drawn = next(point for n in range(50) if SPACE.uses(point := SPACE.draw(Random(n)), "run0/servers"))
    del drawn["run0/servers"]
    assert not SPACE.has(drawn)
    with pytest.raises(DocumentError, match="parameter 'run0/servers' is missing"):
        SPACE.plan(drawn)


def test_sampled_points_are_not_enqueued_again(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    points = [SPACE.draw(Random(n)) for n in range(3)]
    for point in points[:2]:
        study.add_trial(_measured(point))
    studies.enqueue(study, SPACE, points, "drawn")
    assert len(study.trials) == 3


@pytest.mark.parametrize("state", [optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.FAIL])
@pytest.mark.parametrize("methods", [False, True], ids=["builder", "methods"])
def test_trials_without_all_their_parameters_are_no_point(
    methods: bool, state: optuna.trial.TrialState, storage: Path
) -> None:
    """A process may be between two parameters, or have been killed there."""
    study = studies.open_study(storage, "one", SPACE)
    point = next(point for n in range(50) if SPACE.uses(point := SPACE.draw(Random(n)), "run0/servers"))
    known = studies.distributions(SPACE)
    names = [name for name in known if name == BUILDER or (methods and name.endswith("/method"))]
    study.add_trial(
        optuna.trial.create_trial(
            state=state,
            params={name: point[name] for name in names},
            distributions={name: known[name] for name in names},
        )
    )
    for _ in range(2):
        studies.enqueue(study, SPACE, [point], "drawn")
    assert len(study.trials) == 2


def test_trials_with_other_parameters_are_no_point(storage: Path) -> None:
    """A user may have enqueued parts of a point, or parameters of another space."""
    study = studies.open_study(storage, "one", SPACE)
    point = SPACE.draw(Random(1))
    study.enqueue_trial({METHOD: point[METHOD]})
    study.enqueue_trial({"other": 1})
    studies.enqueue(study, SPACE, [point], "drawn")
    assert len(study.trials) == 3


def test_a_bucket_size_is_enqueued_once(storage: Path) -> None:
    buckets: Any = BucketSpace(WORKLOAD, SPACE.cluster)
    study = studies.open_study(storage, "one", buckets)
    study.ask()  # a process that has not drawn its bucket size yet
    buckets.suggest(trial := study.ask({}))
    point = trial.params
    studies.enqueue(study, buckets, [point], "drawn")
    assert len(study.trials) == 2
    for _ in range(2):
        studies.enqueue(study, buckets, buckets.baselines(), attrs.BASELINE)
    assert len(study.trials) == 3


def _measured(point: dict[str, Any]) -> optuna.trial.FrozenTrial:
    """A finished trial as a sampler leaves it."""
    used = {name: value for name, value in point.items() if SPACE.uses(point, name)}
    known = studies.distributions(SPACE)
    return optuna.trial.create_trial(params=used, distributions={name: known[name] for name in used}, value=1.0)


def test_a_study_of_an_earlier_release_goes_on(storage: Path) -> None:
    """Its trials have all parameters."""
    study = optuna.create_study(storage=storages.open_storage(storage), study_name="one")
    studies.describe(study, SPACE)
    sizes = {name: value for name, value in study.user_attrs[studies.SPACE].items() if name != "leaves_out"}
    study.set_user_attr(studies.SPACE, sizes)
    points = [SPACE.draw(Random(n)) for n in range(3)]
    for point in points:
        study.add_trial(optuna.trial.create_trial(params=point, distributions=studies.distributions(SPACE), value=1.0))
    again = studies.open_study(storage, "one", SPACE)
    studies.enqueue(again, SPACE, points, "drawn")
    assert len(again.trials) == 3
    measure(again, [[1.0]])
    assert studies.space_of(again).parameters == SPACE.parameters
    assert [sample.plan for sample in studies.samples_of(again)][:3] == [SPACE.plan(point) for point in points]


def test_dashboards_see_what_the_values_are(storage: Path) -> None:
    """Also in a study of an earlier release, whose values have no name."""
    study = optuna.create_study(storage=storages.open_storage(storage), study_name="one")
    studies.describe(study, SPACE)
    assert study.metric_names is None
    again = studies.open_study(storage, "one", SPACE)
    measure(again, [[2.0]])
    assert studies.load_study(storage).metric_names == ["seconds of a step"]
    assert any("seconds of a step" in str(column) for column in again.trials_dataframe().columns)


def test_a_topology_that_is_not_there_is_an_error_where_it_is_used(storage: Path) -> None:
    began = earlier("native", "pigeons")
    study = studies.open_study(storage, "one", began)
    point = dict(SPACE.draw(Random(1)))
    for method in ("native", "pigeons"):
        study.enqueue_trial({**point, METHOD: method})
        trial = study.ask()
        studies.suggest(trial, began)
        study.tell(trial, 1.0)
    space = studies.space_of(study)
    known, unknown = study.get_trials()
    assert Observations.of([known, unknown], space, -1).measured[0][0] == known.number
    assert len(Observations.of([known, unknown], space, -1).measured) == 1
    attrs.plan_of(known, space)
    with pytest.raises(StudyError, match=r"trial 1: method: 'pigeons' is not known; allowed: "):
        attrs.plan_of(unknown, space)


def test_trials_of_other_parameters_are_refused(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    study.set_user_attr(studies.SPACE, {**study.user_attrs[studies.SPACE], "fingerprint": "0" * 12})
    assert studies.space_of(study).parameters == SPACE.parameters  # nothing binds it yet
    trial = study.ask()
    trial.suggest_categorical("run99/method", ["native", "star"])
    with pytest.raises(StudyError, match="study 'one': plan space: recorded parameter 'run99/method' does not belong"):
        studies.space_of(study)


def test_a_study_of_another_format_is_refused(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    sizes = study.user_attrs[studies.SPACE]
    study.set_user_attr(studies.SPACE, {name: value for name, value in sizes.items() if name != "format"})
    with pytest.raises(StudyError, match="study 'one': format: missing; expected 'autosync-study/2'"):
        studies.open_study(storage, "one", SPACE)
    study.set_user_attr(studies.SPACE, {**sizes, "format": "autosync-study/3"})
    with pytest.raises(StudyError, match="'autosync-study/3' was written by a newer release"):
        studies.load_study(storage)


def test_what_a_storage_raises_is_one_error_of_ours() -> None:
    with (
        pytest.raises(storages.StorageError, match=r"does not answer: OSError: .* run the same command to resume"),
        storage_errors(),
    ):
        raise OSError(28, "No space left on device")


def test_baselines_come_first_once_and_say_so(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    studies.enqueue_baselines(study, SPACE)
    studies.enqueue_baselines(study, SPACE)
    assert len(study.trials) == len(SPACE.baselines())
    measure(study, [[2.0]])
    trial = study.trials[0]
    assert trial.user_attrs[attrs.ORIGIN] == attrs.BASELINE
    name = str(SPACE.baselines()[0][BUILDER])
    assert attrs.plan_of(trial, SPACE) == builders.build(name, WORKLOAD, SPACE.cluster)
    assert studies.samples_of(study)[0].kind == name


def test_points_whose_trials_were_interrupted_are_enqueued_again(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    studies.enqueue_baselines(study, SPACE)
    interrupted, failed, measured = (study.ask() for _ in range(3))
    interrupted.set_user_attr(attrs.INTERRUPTED, True)
    for trial in (interrupted, failed):
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    study.tell(measured, 1.0)
    for _ in range(2):
        studies.enqueue_baselines(study, SPACE)
    assert len(study.trials) == len(SPACE.baselines()) + 1
    assert study.trials[-1].system_attrs["fixed_params"] == SPACE.baselines()[0]


def test_a_study_of_bucket_sizes_is_no_study_of_plans_to_read(storage: Path) -> None:
    buckets: Any = BucketSpace(WORKLOAD, SPACE.cluster)
    study = studies.open_study(storage, "one", buckets)
    with pytest.raises(StudyError, match=r"study 'one': its trials are bucket sizes \(search=horovod\)"):
        studies.space_of(study)


def test_samples_hold_the_mean_of_ranks(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    measure(study, [[1.0, 1.2], [3.0, 2.0]])
    sample = studies.samples_of(study)[0]
    assert sample.steps == (2.0, 1.6)
    assert (sample.workload, sample.cluster) == (WORKLOAD, SPACE.cluster)


def test_trials_stopped_early_are_samples_and_failed_ones_are_not(storage: Path) -> None:
    study = studies.open_study(storage, "one", SPACE)
    pruned, failed, bare = (study.ask() for _ in range(3))
    for trial in (pruned, failed, bare):
        studies.suggest(trial, SPACE)
    pruned.report(4.0, 0)
    study.tell(pruned, state=optuna.trial.TrialState.PRUNED)
    study.tell(failed, state=optuna.trial.TrialState.FAIL)
    study.tell(bare, 5.0)
    assert [sample.steps for sample in studies.samples_of(study)] == [(4.0,), (5.0,)]


def test_a_trial_of_other_parameters_is_named() -> None:
    study = optuna.create_study()
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(StudyError, match="trial 0: plan space: parameter"):
        attrs.plan_of(study.trials[0], SPACE)
    assert issubclass(StudyError, DocumentError)


def test_baselines_are_there_before_a_study_says_what_it_is_about(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that of processes that begin at once only the maker enqueues them."""
    known: list[int] = []
    describe = optuna.Study.set_user_attr

    def set_user_attr(study: optuna.Study, name: str, value: Any) -> None:
        if name == studies.SPACE:
            known.append(len(study.trials))
        describe(study, name, value)

    monkeypatch.setattr(optuna.Study, "set_user_attr", set_user_attr)
    for _ in range(2):
        study = studies.open_study(storage, "one", SPACE, first=SPACE.baselines())
    assert known == [len(SPACE.baselines())] == [len(study.trials)]


def test_a_study_whose_maker_died_among_the_baselines_gets_the_rest(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study(storage=storages.open_storage(storage), study_name="one")
    study.set_user_attr(studies.WORKLOAD, "{}")
    studies.enqueue(study, SPACE, SPACE.baselines()[:2], attrs.BASELINE)
    monkeypatch.setattr(studies, "_DESCRIBE_TIMEOUT", 0.1)
    found = studies.open_study(storage, "one", SPACE, first=SPACE.baselines())
    assert [trial.system_attrs["fixed_params"] for trial in found.trials] == SPACE.baselines()


def test_a_trial_with_several_values_is_an_error() -> None:
    """Another program may have made the study for several objectives."""
    trial = optuna.trial.create_trial(values=[0.1, 0.2])
    for read in (attrs.seconds_of, attrs.measured_steps):
        with pytest.raises(StudyError, match="it has 2 values; allowed: one, the seconds of a step"):
            read(trial)
