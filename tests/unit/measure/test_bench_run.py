"""A bench over workers that are elsewhere, which are stood in for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure import conditions
from lightning_autosync.measure.bench.output import remarks, title
from lightning_autosync.measure.bench.preparation import prepare
from lightning_autosync.measure.bench.result import BenchResult
from lightning_autosync.measure.bench.run import play
from lightning_autosync.measure.bench.settings import BenchSettings
from lightning_autosync.measure.session import ContenderError, MeasurementSession
from lightning_autosync.measure.workers import InputError, WorkerError


class FarPool:
    """Two ranks whose machines are as told."""

    world_size = 2
    pids = (os.getpid(),)

    def __init__(self, machines: list[tuple[str, str]], errors: Mapping[str, WorkerError] | None = None) -> None:
        self._machines = machines
        self._errors = errors or {}

    def run(self, function: Any, /, *, ranks: Any = None, **arguments: Any) -> list[Any]:
        addressed = list(range(self.world_size) if ranks is None else ranks)
        for what in (arguments.get("name"), function.__name__):
            if what in self._errors:
                raise self._errors[what]
        answers = {
            "machine": lambda rank: list(self._machines[rank]),
            "load_average": lambda rank: [7.0, 6.0, 5.0],
            "describe_worker": lambda rank: {"machine": self._machines[rank][1], "cores": 64},
            "bytes_sent": lambda rank: 1000,
            "keep_gradients": lambda rank: None,
            "deviation": lambda rank: 0.0,
            "measure": lambda rank: [0.1] * arguments["steps"],
            "set_up": lambda rank: None,
        }
        return [answers[function.__name__](rank) for rank in addressed]

    def close(self) -> None:
        """Nothing to end."""


class FarSession(MeasurementSession):
    """A session on such a pool."""

    far: FarPool

    def _start(self) -> FarPool:
        return self.far


def played(
    launch: str, machines: list[tuple[str, str]], errors: Mapping[str, WorkerError] | None = None
) -> BenchResult:
    settings = BenchSettings.parse(
        {
            "model": {"kind": "flat", "mib": 1.0},
            "launch": {"kind": launch},
            "cluster": ClusterSpec.uniform(nodes=2, bandwidth=1e6).to_dict(),
            "contenders": {"byteps": {"builder": "byteps"}},
            "rounds": 2,
        }
    )
    preparation = prepare(settings)
    session = FarSession(preparation.cluster, settings.launch, settings.timeout)
    session.far = FarPool(machines, errors)
    return play(settings, preparation, session)


@pytest.mark.parametrize(
    ("launch", "machines"),
    [
        ("ssh", [("a", "far"), ("b", "farther")]),
        ("ssh", [conditions.machine()] * 2),  # whose processes are not this one's
        ("local", [conditions.machine(), ("b", "farther")]),  # a job that torchrun started
    ],
)
def test_nobody_watches_the_load_of_other_machines(launch: str, machines: list[tuple[str, str]]) -> None:
    found = played(launch, machines)
    assert found.foreign_cores is None
    assert found.conditions["machines"] == [name for _, name in sorted(set(machines))]
    assert found.conditions["cores"] == 64
    assert found.conditions["load_average_before"] == [7.0, 6.0, 5.0]
    assert "loopback" not in title(found)
    assert f"rank 0's machine, {machines[0][1]}" in "\n".join(remarks(found))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_load_of_this_machine_is_watched() -> None:
    found = played("local", [conditions.machine()] * 2)
    assert found.foreign_cores is not None
    assert title(found).endswith("loopback")


def test_an_error_names_the_contender_unless_what_it_was_given_is_wrong() -> None:
    machines = [("b", "farther")] * 2
    with pytest.raises(ContenderError, match=r"^contender 'byteps': rank 1 died$") as caught:
        played("local", machines, {"byteps": WorkerError("rank 1 died", 1, "a traceback", "OSError", "gone")})
    assert (caught.value.contender, caught.value.rank, caught.value.kind) == ("byteps", 1, "OSError")
    with pytest.raises(ContenderError, match=r"^model\.data: missing$") as caught:
        played("local", machines, {"byteps": InputError("model.data: missing", 1)})
    assert isinstance(caught.value.failure, InputError)


def test_what_fails_in_the_gradients_of_the_reference_is_not_blamed_on_others() -> None:
    failing = WorkerError("rank 0 raised AssertionError", 0)
    with pytest.raises(ContenderError) as caught:
        played("local", [("b", "farther")] * 2, {"keep_gradients": failing})
    assert caught.value.contender == "ddp"


def test_what_fails_right_behind_a_contenders_steps_is_in_its_turn() -> None:
    with pytest.raises(ContenderError) as caught:
        played("local", [("b", "farther")] * 2, {"bytes_sent": WorkerError("rank 0 died", 0)})
    assert caught.value.contender == "ddp"
