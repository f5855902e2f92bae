"""The sampler of plans: it finds what the simulator is wrong about, works in parallel, and repeats nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import forked
import numpy
import optuna
import pytest
from clusters import uneven_cluster
from optuna.trial import TrialState

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.learned import Estimate, ReplayEstimator
from lightning_autosync.learned.dataset import Sample
from lightning_autosync.learned.dataset.sample import step_noise
from lightning_autosync.plan import SyncPlan, builders, compile_plan, signature
from lightning_autosync.plan.space import BUILDER, COMPOSED, PlanSpace
from lightning_autosync.replay import Constants, Replay
from lightning_autosync.replay.replay import Detail
from lightning_autosync.search import storages, studies
from lightning_autosync.search import trial_attributes as attrs
from lightning_autosync.search.features import PlanFeatures, similarity
from lightning_autosync.search.population import Candidate, Population
from lightning_autosync.search.sampler import AutoSyncSampler
from lightning_autosync.search.sampler.cost_model import CostEstimate, CostModel, CrossFit
from lightning_autosync.search.sampler.error_model import ErrorModel
from lightning_autosync.search.sampler.observations import CHOICE, Choice, Observations, decode, encode, point_of
from lightning_autosync.search.sampler.proposer import pick
from lightning_autosync.workload import Variable, Workload

SMALL = {"population": 48, "batch": 4}


def layers(count: int = 16, name: str = "layers") -> Workload:
    variables = tuple(Variable(name=f"v{number:02}", shape=(60, 70)) for number in range(count))
    return Workload(name=name, variables=variables, forward_time=0.004, backward_time=0.008)


SPACE = PlanSpace(layers(), uneven_cluster(4))
REPLAY = Replay(SPACE.workload, SPACE.cluster)
PRICES: dict[Any, Any] = {}
"""What populations of `SPACE` find out about plans."""


@pytest.fixture(autouse=True)
def priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers of many tests look at the same plans, whose prices do not depend on the sampler."""
    price = Population._price

    def remembered(self: Population, plan: SyncPlan, detail: Detail) -> Any:
        if self.space is not SPACE:
            return price(self, plan, detail)
        key = (plan.fingerprint, detail, self._two_level_collectives, self._overlaps, self._replay._constants)
        if key not in PRICES:
            PRICES[key] = price(self, plan, detail)
        return PRICES[key]

    monkeypatch.setattr(Population, "_price", remembered)


def seconds(plan: SyncPlan) -> float:
    return REPLAY.predict(compile_plan(plan, SPACE.workload, SPACE.cluster)).step_time


def otherwise(plan: SyncPlan) -> float:
    """A wire on which trees cost twice what the replay says."""
    trees = sum(group.topology != "native" for group in plan.groups) / len(plan.groups)
    return seconds(plan) * (1 + trees)


def tune(sampler: AutoSyncSampler, count: int, truth=seconds, study: optuna.Study | None = None) -> optuna.Study:
    study = study or optuna.create_study(sampler=sampler)
    for _ in range(count):
        trial = study.ask()
        study.tell(trial, truth(SPACE.plan(studies.suggest(trial, SPACE))))
    return study


def test_the_first_proposals_are_no_slower_than_any_builder() -> None:
    study = tune(AutoSyncSampler(SPACE, seed=0, **SMALL), 4)
    assert study.best_value <= min(seconds(SPACE.plan(point)) for point in SPACE.baselines())


@pytest.mark.slow
def test_it_learns_what_the_simulator_gets_wrong() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    studies.enqueue_baselines(study, SPACE)
    tune(study.sampler, 40, otherwise, study)
    rng = Random(0)
    drawn = [otherwise(SPACE.plan(SPACE.draw(rng))) for _ in range(200)]
    assert study.best_value < min(drawn)
    late = study.trials[-1]
    assert late.user_attrs[attrs.PREDICTED] == pytest.approx(late.value, rel=0.15)


def test_no_plan_is_proposed_twice_and_failed_ones_never_again() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=1, **SMALL))
    studies.enqueue_baselines(study, SPACE)
    signatures = []
    for number in range(26):
        trial = study.ask()
        plan = SPACE.plan(studies.suggest(trial, SPACE))
        signatures.append(signature(plan))
        if number % 5 == 0:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, seconds(plan))
    proposed = signatures[len(SPACE.baselines()) :]
    assert len(set(proposed)) == len(proposed)
    assert not set(proposed) & set(signatures[: len(SPACE.baselines())])


@pytest.mark.parametrize("interrupted", [False, True])
def test_only_a_plan_that_failed_by_itself_stays_tried(interrupted: bool) -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    plans = []
    for _ in range(2):
        trial = study.ask()
        plans.append(signature(SPACE.plan(studies.suggest(trial, SPACE))))
        trial.set_user_attr(attrs.INTERRUPTED, interrupted)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert (plans[0] == plans[1]) == interrupted


def test_a_space_smaller_than_the_budget_is_no_dead_end() -> None:
    tiny = PlanSpace(Workload(name="one", variables=(Variable(name="v", shape=(3,)),)), uneven_cluster(2))
    plans = {signature(tiny.plan(tiny.draw(Random(number)))) for number in range(200)}
    study = optuna.create_study(sampler=AutoSyncSampler(tiny, seed=0, **SMALL))
    for _ in range(len(plans) + len(tiny.baselines()) + 3):
        trial = study.ask()
        tiny.plan(studies.suggest(trial, tiny))
        study.tell(trial, 1.0)


def test_a_batch_is_of_different_plans_and_published_before_its_parameters() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    trials = [study.ask() for _ in range(5)]
    for trial in trials:
        trial.suggest_categorical("builder", SPACE.parameters["builder"])  # the others are still unknown
    found = study.get_trials(deepcopy=False)
    points = [point_of(trial, SPACE) for trial in found]
    assert all(CHOICE in trial.system_attrs for trial in found)
    assert len({signature(SPACE.plan(point)) for point in points if point is not None}) == 5


def test_a_worker_takes_a_later_place_while_earlier_ones_choose() -> None:
    def first_choice(earlier: int) -> dict[str, object]:
        study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
        for _ in range(earlier):
            study.ask()  # runs, and has chosen nothing yet
        trial = study.ask()
        return studies.suggest(trial, SPACE)

    chosen = [first_choice(earlier) for earlier in range(3)]
    assert len({signature(SPACE.plan(point)) for point in chosen}) == 3


@pytest.mark.slow
def test_two_processes_go_on_with_one_storage(tmp_path: Path) -> None:
    path = tmp_path / "one.journal"
    one = studies.open_study(path, "one", SPACE, sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    tune(one.sampler, 6, otherwise, one)
    other = studies.open_study(path, "one", SPACE, sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    running = one.ask()
    taken = signature(SPACE.plan(studies.suggest(running, SPACE)))
    tune(other.sampler, 6, otherwise, other)
    plans = [signature(SPACE.plan(trial.params)) for trial in other.trials]
    assert len(set(plans)) == len(plans) == 13
    assert plans.count(taken) == 1


@pytest.mark.slow
def test_processes_that_propose_at_once_share_a_storage(tmp_path: Path) -> None:
    """They begin at the same moment; two choices made within one may be equal, hardly any are."""
    path = tmp_path / "one.journal"
    studies.open_study(path, "one", SPACE)
    context = forked.context()
    barrier = context.Barrier(2)
    workers = [context.Process(target=_go_on, args=(path, barrier, seed)) for seed in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    study = studies.open_study(path, "one", SPACE)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 16
    assert {trial.user_attrs["seed"] for trial in study.trials} == {0, 1}
    plans = [signature(SPACE.plan(trial.params)) for trial in study.trials]
    assert len(set(plans)) >= 12


def _go_on(path: Path, barrier: Any, seed: int) -> None:
    study = studies.open_study(path, "one", SPACE, sampler=AutoSyncSampler(SPACE, seed=seed, **SMALL))
    barrier.wait(60)
    for _ in range(8):
        trial = study.ask()
        trial.set_user_attr("seed", seed)
        study.tell(trial, seconds(SPACE.plan(studies.suggest(trial, SPACE))))


def test_where_some_parameters_are_given_it_proposes_the_others_to_match() -> None:
    fixed = {BUILDER: COMPOSED}
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, refine=4, **SMALL))
    for _ in range(8):
        study.enqueue_trial(fixed)
    tune(study.sampler, 8, study=study)
    assert all(trial.params[BUILDER] == COMPOSED and attrs.REFINED not in trial.user_attrs for trial in study.trials)
    rng = Random(0)
    drawn = sorted(seconds(SPACE.plan({**SPACE.draw(rng), **fixed})) for _ in range(50))
    assert statistics.median(trial.value for trial in study.trials) < drawn[5]
    assert len({signature(SPACE.plan(trial.params)) for trial in study.trials}) == 8


def test_what_is_given_again_is_priced_as_what_runs() -> None:
    """One parameter with two values is not given, so from the third trial on no plan is left that was not tried."""
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    drawn = (SPACE.used(SPACE.draw(Random(number))) for number in range(50))
    point, free = next((point, name) for point in drawn for name in point if name.endswith("/priority"))
    given = {name: value for name, value in point.items() if name != free}
    for _ in range(4):
        study.enqueue_trial(given)
    tune(study.sampler, 4, study=study)
    assert {trial.params[free] for trial in study.trials[:2]} == {0, 1}
    for trial in study.trials:
        assert given.items() <= trial.params.items()
        assert trial.user_attrs[attrs.PREDICTED] == pytest.approx(trial.value, rel=0.1)


def test_a_points_own_plan_goes_before_a_refinement_that_does_the_same() -> None:
    population = Population(SPACE, Constants(), 16)
    own, other = list(SPACE.coherent())[:2]
    refined = population.of(Choice(SPACE.normal(other), json.dumps(SPACE.plan(own).to_dict())))
    assert refined is not None
    assert refined.refined
    added = population.add(own, "drawn")
    assert added is not None
    assert not added.refined
    assert population.candidates == {added.signature: added}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_around_it_that_fixes_parameters_is_refused() -> None:
    sampler = optuna.samplers.PartialFixedSampler({BUILDER: COMPOSED}, AutoSyncSampler(SPACE, seed=0, **SMALL))
    with pytest.raises(ValueError, match=r"but does not get builder; .* study\.enqueue_trial"):
        tune(sampler, 1)


def test_attributes_of_the_user_are_no_concern_of_it() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, refine=2, **SMALL))
    for _ in range(4):
        trial = study.ask()
        value = seconds(SPACE.plan(studies.suggest(trial, SPACE)))
        for name, other in {"steps": 1000, "run": {}, "refined": True, "batch": [0.1]}.items():
            trial.set_user_attr(name, other)
        study.tell(trial, value)
    assert len(Observations.of(study.trials, SPACE, -1).measured) == 4


def test_of_many_sources_only_so_much_is_looked_at() -> None:
    workloads = [layers(2, f"model {number}") for number in range(100)]
    plan = builders.all_reduce(workloads[0], SPACE.cluster)
    sources = [Sample(workload, SPACE.cluster, plan, (0.1 + n,)) for workload in workloads for n in range(20)]
    errors = CostModel(SPACE.workload, SPACE.cluster, None, sources).source_errors()
    assert errors is not None
    assert len(errors[1]) == 4 * len(workloads)


def test_threads_share_a_sampler() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    study.optimize(lambda trial: seconds(SPACE.plan(studies.suggest(trial, SPACE))), n_trials=8, n_jobs=4)
    plans = {signature(SPACE.plan(trial.params)) for trial in study.trials}
    assert len(plans) == 8


def test_a_copy_draws_the_same_until_it_is_reseeded() -> None:
    sampler = AutoSyncSampler(SPACE, seed=5, **SMALL)
    copies = [pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)]
    values = [[trial.params for trial in tune(one, 3).trials] for one in (sampler, *copies)]
    assert values[0] == values[1] == values[2]


def test_trials_stopped_early_count() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    trial = study.ask()
    studies.suggest(trial, SPACE)
    trial.report(0.5, 0)
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    found = Observations.of(study.get_trials(deepcopy=False), SPACE, own=7)
    assert [value for _, _, value in found.measured] == [math.log(0.5)]


def test_unknown_links_leave_it_to_the_trials() -> None:
    nodes = [{"name": f"n{rank}"} for rank in range(4)]
    links = [{"a": node["name"], "b": "switch"} for node in nodes]
    unknown = ClusterSpec.from_dict(
        {"format": ClusterSpec.FORMAT, "name": "unknown", "nodes": nodes, "switches": ["switch"], "links": links}
    )
    assert not unknown.measured
    space = PlanSpace(SPACE.workload, unknown)
    study = optuna.create_study(sampler=AutoSyncSampler(space, seed=0, **SMALL))

    def measure(trial: optuna.Trial) -> float:
        plan = space.plan(studies.suggest(trial, space))
        return 0.1 + 0.1 * sum(group.topology != "ring" for group in plan.groups)

    study.optimize(measure, n_trials=30)
    assert study.best_value <= 0.2


def test_times_are_minimized() -> None:
    study = optuna.create_study(direction="maximize", sampler=AutoSyncSampler(SPACE, **SMALL))
    with pytest.raises(ValueError, match="direction must be 'minimize'"):
        studies.suggest(study.ask(), SPACE)
    with pytest.raises(ValueError, match="batch: must be an integer of 1 or more, got 0"):
        AutoSyncSampler(SPACE, batch=0)


class Learner(ReplayEstimator):
    """A simulator that notes what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.taught: list[int] = []

    def fit(self, samples) -> None:
        self.taught.append(len(samples))


class Wrapped:
    """An estimator of another class than the replay's, which is trained."""

    def __init__(self) -> None:
        self.inner = Learner()

    def estimate(self, workload, cluster, plans) -> Estimate:
        return self.inner.estimate(workload, cluster, plans)

    def fit(self, samples) -> None:
        self.inner.fit(samples)


def test_a_simulator_that_learns_is_refitted_as_trials_come_in() -> None:
    estimator = Wrapped()
    tune(AutoSyncSampler(SPACE, estimator=estimator, seed=0, refit=5, **SMALL), 12)
    assert estimator.inner.taught == [5, 10]


@pytest.mark.slow
def test_a_sampler_that_prepares_proposes_the_same_and_learns_nothing_twice() -> None:
    taught, proposed = [], []
    for beforehand in (False, True):
        estimator = Wrapped()
        sampler = AutoSyncSampler(SPACE, estimator=estimator, seed=0, refit=5, **SMALL)
        study = optuna.create_study(sampler=sampler)
        for _ in range(12):
            trial = study.ask()
            if beforehand:
                sampler.prepare(study.get_trials(), trial.number)
            study.tell(trial, seconds(SPACE.plan(studies.suggest(trial, SPACE))))
        taught.append(estimator.inner.taught)
        proposed.append([trial.params for trial in study.trials])
    assert taught == [[5, 10]] * 2
    assert proposed[0] == proposed[1]


def test_what_others_told_meanwhile_is_not_learned_within_a_proposal() -> None:
    estimator = Wrapped()
    sampler = AutoSyncSampler(SPACE, estimator=estimator, refit=2, **SMALL)
    study = optuna.create_study(sampler=sampler)
    trial = study.ask()
    sampler.prepare(study.get_trials(), trial.number)
    other = AutoSyncSampler(SPACE, **SMALL)
    tune(other, 3, study=optuna.load_study(study_name=study.study_name, storage=study._storage, sampler=other))
    studies.suggest(trial, SPACE)
    assert estimator.inner.taught == []
    sampler.prepare(study.get_trials(), study.ask().number)
    assert estimator.inner.taught == [3]


def test_sources_are_estimated_beforehand(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_autosync")
    source_space = PlanSpace(layers(20, "deep"), uneven_cluster(3))
    source = optuna.create_study()
    studies.describe(source, source_space)
    source.enqueue_trial(source_space.draw(Random(0)))
    trial = source.ask()
    studies.suggest(trial, source_space)
    source.tell(trial, 0.1)
    asked: list[str] = []

    class Asked(ReplayEstimator):
        def estimate(self, workload, cluster, plans) -> Estimate:
            asked.append(workload.name)
            return super().estimate(workload, cluster, plans)

    sampler = AutoSyncSampler(SPACE, estimator=Asked(), source_studies=[source], **SMALL)
    assert "transferred from other studies: 1 measured plan and 1 best point" in caplog.messages
    study = optuna.create_study(sampler=sampler)
    trial = study.ask()
    sampler.prepare(study.get_trials(), trial.number)
    assert asked == ["deep"]
    studies.suggest(trial, SPACE)
    assert asked.count("deep") == 1


def test_nothing_is_learned_for_a_trial_whose_point_is_given() -> None:
    estimator = Wrapped()
    sampler = AutoSyncSampler(SPACE, estimator=estimator, refit=1, **SMALL)
    study = optuna.create_study(sampler=sampler)
    tune(sampler, 1, study=study)
    builder = SPACE.baselines()[0]
    for point in (builder, {BUILDER: builder[BUILDER]}):  # a builder makes one plan, whatever the other parameters are
        study.enqueue_trial(point)
        sampler.prepare(study.get_trials(), study.ask().number)
    assert estimator.inner.taught == []
    study.enqueue_trial({BUILDER: COMPOSED})
    sampler.prepare(study.get_trials(), study.ask().number)
    assert estimator.inner.taught == [1]


class Memorizer:
    """A simulator that knows by heart what it was taught; of anything else it says what the replay says."""

    def __init__(self) -> None:
        self.known: dict[str, float] = {}
        self.noise: dict[str, float] = {}

    def estimate(self, workload, cluster, plans) -> Estimate:
        known = ReplayEstimator().estimate(workload, cluster, plans).seconds
        told = [self.known.get(signature(plan), guess) for plan, guess in zip(plans, known, strict=True)]
        return Estimate(numpy.array(told), numpy.zeros(len(plans)))

    def fit(self, samples) -> None:
        self.known |= {signature(sample.plan): sample.seconds for sample in samples}
        self.noise |= {signature(sample.plan): sample.noise for sample in samples}

    def save(self, directory) -> None:
        raise NotImplementedError


@pytest.mark.slow
def test_errors_of_a_simulator_are_those_on_plans_that_it_was_not_taught() -> None:
    sampler = AutoSyncSampler(SPACE, estimator=Memorizer(), seed=0, refit=20, **SMALL)
    study = tune(sampler, 21, lambda plan: 2 * seconds(plan))
    late = study.trials[-1]  # the first after all others were learned by heart
    assert late.user_attrs[attrs.PREDICTED] == pytest.approx(late.value, rel=0.1)


def test_a_simulator_is_told_how_sure_a_time_is() -> None:
    estimator = Memorizer()
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, estimator=estimator, seed=0, refit=2, **SMALL))
    expected = {}
    for spread in (0.01, 0.03, 0.0):
        trial = study.ask()
        plan = SPACE.plan(studies.suggest(trial, SPACE))
        steps = (0.1 - spread, 0.1, 0.1 + spread)
        trial.set_user_attr(attrs.STEPS, [steps])
        study.tell(trial, 0.1)
        expected[signature(plan)] = step_noise(steps)
    assert len(estimator.noise) == 2  # the third trial was told after the training that it began with
    assert estimator.noise == pytest.approx({name: expected[name] for name in estimator.noise})
    assert min(estimator.noise.values()) > 0.04


def test_errors_on_sources_are_those_of_plans_that_were_held_out_too() -> None:
    other = PlanSpace(layers(20, "deep"), uneven_cluster(3))
    replay, rng = Replay(other.workload, other.cluster), Random(0)
    plans = [other.plan(other.draw(rng)) for _ in range(20)]
    steps = [2 * replay.predict(compile_plan(plan, other.workload, other.cluster)).step_time for plan in plans]
    samples = [Sample(other.workload, other.cluster, plan, (step,)) for plan, step in zip(plans, steps, strict=True)]
    estimator = Memorizer()
    holdout = CrossFit(estimator, samples)
    holdout.fit([])
    assert estimator.estimate(other.workload, other.cluster, plans).seconds == pytest.approx(steps)
    unseen = numpy.exp(holdout.unseen(other.workload, other.cluster, plans))
    assert unseen == pytest.approx([step / 2 for step in steps], rel=0.02)


def test_sources_teach_and_seed_but_do_not_enter_the_study() -> None:
    source_space = PlanSpace(layers(20, "deep"), uneven_cluster(3))
    source = optuna.create_study()
    studies.describe(source, source_space)
    rng = Random(0)
    for _ in range(6):
        source.enqueue_trial(source_space.draw(rng))
        trial = source.ask()
        studies.suggest(trial, source_space)
        source.tell(trial, 0.1)
    estimator = Wrapped()
    sampler = AutoSyncSampler(SPACE, estimator=estimator, source_studies=[source], seed=0, **SMALL)
    study = tune(sampler, 2)
    assert estimator.inner.taught == [6]
    assert len(study.trials) == 2
    assert len(source.trials) == 6


def test_what_a_source_got_wrong_is_expected_here_too() -> None:
    embedding = PlanFeatures(SPACE.workload)
    rng = Random(3)
    plans = [SPACE.plan(SPACE.draw(rng)) for _ in range(60)]
    features = numpy.array([embedding(plan) for plan in plans])
    ring = numpy.array([sum(g.topology == "ring" for g in plan.groups) / len(plan.groups) for plan in plans])
    errors = 0.5 * ring
    residuals = ErrorModel()
    tasks = numpy.array([1.0] * 50 + [0.0] * 2)
    residuals.fit(features[:52], errors[:52], tasks)
    expected, _ = residuals.predict(features[52:])
    assert numpy.corrcoef(expected, errors[52:])[0, 1] > 0.7


@pytest.mark.slow
def test_what_is_little_known_of_is_bred_however_the_simulator_prices_it(monkeypatch) -> None:
    def rings(candidate: Candidate) -> float:
        groups = candidate.plan.groups
        return sum(group.topology == "ring" for group in groups) / len(groups)

    def bred(deviation: float) -> float:
        """The mean share of rings among what was bred, where so much is not known of plans of rings alone."""
        sampler = AutoSyncSampler(SPACE, seed=0, **SMALL)
        proposer = sampler._proposer
        assert proposer is not None
        known = proposer._cost.rough

        def rough(candidates: Sequence[Candidate]) -> CostEstimate:
            return CostEstimate(known(candidates).mean, deviation * numpy.array([rings(one) for one in candidates]))

        monkeypatch.setattr(proposer._cost, "rough", rough)
        tune(sampler, 12)
        return float(numpy.mean([rings(one) for one in proposer._population.candidates.values()]))

    assert bred(1.0) > 2 * bred(0.0)


def test_uncertainty_grows_away_from_what_was_measured() -> None:
    embedding = PlanFeatures(SPACE.workload)
    rng = Random(4)
    features = numpy.array([embedding(SPACE.plan(SPACE.draw(rng))) for _ in range(20)])
    residuals = ErrorModel()
    residuals.fit(features[:10], numpy.linspace(0, 0.2, 10), numpy.zeros(10))
    _, deviation = residuals.predict(features)
    assert deviation[:10].max() < deviation[10:].max()
    mean, _ = residuals.predict(features[:10])
    assert numpy.abs(mean - numpy.linspace(0, 0.2, 10)).max() < 0.1


def test_the_greedy_choice_avoids_what_is_alike() -> None:
    embedding = PlanFeatures(SPACE.workload)
    rng = Random(5)
    one, other = (embedding(SPACE.plan(SPACE.draw(rng))) for _ in range(2))
    features = numpy.array([one, one, other])
    beliefs = CostEstimate(numpy.array([0.0, 0.001, 0.01]), numpy.zeros(3))
    assert pick(beliefs, features, numpy.zeros((0, len(one))), 3) == [0, 2, 1]
    assert pick(beliefs, features, features[:1], 1) == [2]


def test_features_do_not_depend_on_names_and_compare_across_models() -> None:
    plan = SPACE.plan(SPACE.draw(Random(6)))
    renamed = plan.model_copy(
        update={"groups": tuple(group.model_copy(update={"name": f"x{group.name}"}) for group in plan.groups)}
    )
    assert signature(renamed) == signature(plan)
    deep = PlanSpace(layers(48, "deep"), uneven_cluster(4))
    whole = [next(s.coherent()) for s in (SPACE, deep)]
    one = PlanFeatures(SPACE.workload)(SPACE.plan(whole[0]))
    other = PlanFeatures(deep.workload)(deep.plan(whole[1]))
    assert similarity(one[None], other[None])[0, 0] > 0.95


def test_times_are_taken_as_the_reference_beside_them_shows_the_machine() -> None:
    """The machine is half as fast for the later trials, and another run's always was."""
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    proposed = []
    for number in range(18):
        trial = study.ask()
        run, slow = ("other", 4.0) if number >= 12 else ("own", 2.0 if number >= 6 else 1.0)
        for name, value in (
            (attrs.RUN, run),
            (attrs.BATCH, number),
            (attrs.REFERENCE, slow),
        ):
            trial.set_user_attr(name, value)
        proposed.append(seconds(SPACE.plan(studies.suggest(trial, SPACE))))
        trial.set_user_attr(attrs.PRICE, proposed[-1])
        study.tell(trial, proposed[-1] * slow)
    asking = study.ask()
    asking.set_user_attr(attrs.RUN, "own")
    found = Observations.of(study.get_trials(deepcopy=False), SPACE, asking.number)
    brought = numpy.exp([logarithm for _, _, logarithm in found.measured])
    assert brought == pytest.approx([1.5 * one for one in proposed])


def test_what_was_proposed_is_known_to_the_live_trial() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    trial = study.ask()
    plan = SPACE.plan(studies.suggest(trial, SPACE))
    assert trial.user_attrs[attrs.ORIGIN] in (
        attrs.BUILT,
        "coherent",
        "drawn",
        "evolved",
        "neighbour",
    )
    assert trial.user_attrs[attrs.PREDICTED] == pytest.approx(seconds(plan))
    assert trial.user_attrs.items() <= study.trials[0].user_attrs.items()


@pytest.mark.slow
def test_refined_plans_are_tried_in_place_of_their_points() -> None:
    """They are told from their points, count as what they are, and are not proposed again by whoever goes on."""
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=3, refine=6, **SMALL))
    studies.describe(study, SPACE)
    signatures = []

    def go_on(count: int) -> None:
        for _ in range(count):
            trial = study.ask()
            point = studies.suggest(trial, SPACE)
            assert point == SPACE.used(SPACE.normal(point))
            plan = attrs.plan_of(trial, SPACE)
            assert (plan != SPACE.plan(point)) == (attrs.REFINED in trial.user_attrs)
            signatures.append(signature(plan))
            study.tell(trial, otherwise(plan))

    go_on(20)
    study.sampler = AutoSyncSampler(SPACE, seed=3, refine=6, **SMALL)
    go_on(20)
    refined = [trial for trial in study.trials if attrs.REFINED in trial.user_attrs]
    assert len(refined) >= 5
    assert min(trial.number for trial in refined) >= 6
    assert {trial.user_attrs[attrs.ORIGIN] for trial in refined} == {"refined"}
    assert len(set(signatures)) == len(signatures)
    assert [signature(sample.plan) for sample in studies.samples_of(study)] == signatures


def test_a_point_that_others_decide_on_is_not_refined() -> None:
    sampler = AutoSyncSampler(SPACE, seed=0, refine=1, **SMALL)
    study = optuna.create_study(sampler=sampler)
    given = next(name for name, domain in SPACE.parameters.items() if len(domain) > 2 and name != "builder")
    for _ in range(12):
        study.enqueue_trial({given: SPACE.parameters[given][1]})
    tune(sampler, 12, study=study)
    assert not any(attrs.REFINED in trial.user_attrs for trial in study.trials)


def test_a_refined_plan_that_is_none_gives_a_clear_error() -> None:
    study = optuna.create_study(sampler=AutoSyncSampler(SPACE, seed=0, **SMALL))
    trial = study.ask()
    studies.suggest(trial, SPACE)
    for text in ("{", "{}", "3"):
        trial.set_user_attr(attrs.REFINED, text)
        with pytest.raises(storages.StudyError, match=r"trial 0: autosync:refined.*"):
            attrs.plan_of(trial, SPACE)
    study.tell(trial, 1.0)
    tune(study.sampler, 3, study=study)  # the sampler leaves it out


def test_points_are_published_shortly_and_read_again() -> None:
    rng = Random(7)
    for _ in range(20):
        point = SPACE.draw(rng)
        assert decode(encode(point, SPACE), SPACE) == point
    assert decode("z" * len(SPACE.parameters), SPACE) is None
    assert decode("0", SPACE) is None
