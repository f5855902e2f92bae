"""Sweeps in Hydra's syntax become Optuna's distributions, and values overrides again."""

from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hydra_plugins.autosync._config import SweepError
from hydra_plugins.autosync._space import read_space


@pytest.mark.parametrize(
    ("sweep", "distribution"),
    [
        ("a,b", CategoricalDistribution(["a", "b"])),
        ("2,2.5,true,null", CategoricalDistribution([2, 2.5, True, None])),
        ("1,true", CategoricalDistribution(["1", "True"])),  # equal to each other as numbers
        ("[1,2],[3]", CategoricalDistribution(["[1,2]", "[3]"])),
        ("range(1,10)", IntDistribution(1, 9)),
        ("range(1,10,3)", IntDistribution(1, 7, step=3)),
        ("range(9,0,-4)", IntDistribution(1, 9, step=4)),
        ("range(0,1,0.25)", FloatDistribution(0, 0.75, step=0.25)),
        ("interval(0.5,2)", FloatDistribution(0.5, 2)),
        ("tag(log,interval(0.001,1))", FloatDistribution(0.001, 1, log=True)),
        ("int(interval(1,8))", IntDistribution(1, 8)),
        ("tag(log,int(interval(1,8)))", IntDistribution(1, 8, log=True)),
    ],
)
def test_every_kind_of_sweep(sweep: str, distribution: object) -> None:
    for space in (read_space({"key": sweep}, []), read_space({}, [f"key={sweep}"])):
        assert [parameter.distribution for parameter in space.parameters] == [distribution]


def test_values_become_the_overrides_that_they_came_from() -> None:
    space = read_space({}, ["cluster=a,{name: x}", "+n=range(0,3)", "fixed=1", "text='a b',c", "~gone"])
    grid = list(space.grid())
    assert len(grid) == 2 * 3 * 2
    assert space.overrides(grid[0]) == ["fixed=1", "~gone", "cluster=a", "+n=0", "text='a b'"]
    assert space.overrides(grid[-1]) == ["fixed=1", "~gone", "cluster={name:x}", "+n=2", "text=c"]


def test_the_command_line_goes_before_the_config() -> None:
    params = {"cluster": "a,b", "model": "c,d", "x": 1, "+y": "interval(0,1)"}
    space = read_space(params, ["cluster=e", "model=f,g", "+y=2"])
    assert space.fixed == ("cluster=e", "x=1", "+y=2")
    assert [(one.key, one.values()) for one in space.parameters] == [("model", ["f", "g"])]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("shuffle(a,b)", "key: shuffle is not allowed"),
        ("a,a", "a value is given twice"),
        ("tag(log,interval(0,1))", "key=tag.*log"),
        ("range(3,3)", "the range is empty"),
    ],
)
def test_what_has_no_meaning_is_refused(sweep: str, message: str) -> None:
    with pytest.raises(SweepError, match=message):
        read_space({"key": sweep}, [])


def test_a_grid_has_no_intervals() -> None:
    space = read_space({}, ["a=1,2", "b=interval(0,1)"])
    with pytest.raises(SweepError, match=r"b: a grid cannot enumerate an interval.*sampler=tpe"):
        list(space.grid())
