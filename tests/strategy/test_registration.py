"""Names in Lightning's registries, and what importing the package costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap

import forked
import pytest
from lightning.fabric import Fabric

from lightning_autosync.errors import PlanError
from lightning_autosync.strategy.registration import STRATEGIES

CHECK = """
names = {names!r}
from lightning.pytorch.strategies import StrategyRegistry
from lightning.fabric.strategies import STRATEGY_REGISTRY
import lightning.pytorch
strategy = StrategyRegistry.get("autosync_ps")
assert isinstance(strategy, lightning_autosync.AutoSyncStrategy), strategy
assert isinstance(STRATEGY_REGISTRY.get("autosync"), lightning_autosync.AutoSyncFabricStrategy)
assert set(names) <= set(StrategyRegistry)
assert set(names) <= set(STRATEGY_REGISTRY)
assert isinstance(StrategyRegistry.get("autoddl"), lightning_autosync.AutoDDLStrategy)
"""
LIGHTNING_FIRST = """
import sys, lightning.pytorch
before = set(sys.modules)
import lightning_autosync
from lightning_autosync import AutoSyncStrategy, SyncPlan, ClusterSpec, builders, Workload
tools = {'dgl', 'optuna', 'hydra', 'matplotlib'} & (set(sys.modules) - before)
assert not tools, tools
"""
FORGOTTEN = """
import sys
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
for name in {names!r}:
    StrategyRegistry.pop(name, None)
    STRATEGY_REGISTRY.pop(name, None)
packages = ('lightning_autosync', 'dgl', 'optuna', 'hydra', 'matplotlib')
for name in [name for name in sys.modules if name.partition('.')[0] in packages]:
    del sys.modules[name]
"""
"""Makes a process that has imported the package and the tools one that has imported Lightning alone."""
ORDERS = {
    "lightning first, and training imports no tools": LIGHTNING_FIRST,
    "autosync first": "import lightning_autosync",
    "class first": "from lightning_autosync import AutoSyncStrategy\nimport lightning_autosync",
}


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_are_registered_where_lightning_is_there_and_training_imports_no_tools() -> None:
    names = list(STRATEGIES)
    script = FORGOTTEN.format(names=names) + LIGHTNING_FIRST + CHECK.format(names=names)
    done = forked.run([sys.executable, "-c", script], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_names_are_registered_in_any_order_of_imports(order: str) -> None:
    run(f"{ORDERS[order]}\n{CHECK.format(names=list(STRATEGIES))}")


@pytest.mark.slow
def test_pytorch_lightning_has_its_own_class_and_the_package_may_be_imported_first() -> None:
    pytest.importorskip("pytorch_lightning")
    run(
        "import lightning_autosync\n"
        "from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry\n"
        "assert isinstance(StrategyRegistry.get('autosync'), DDPStrategy)\n"
    )


def test_importing_the_package_imports_nothing_heavy() -> None:
    run(
        "import sys, lightning_autosync\n"
        "heavy = {'torch', 'lightning', 'dgl', 'optuna', 'hydra', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "public = {'AutoSyncStrategy', 'SyncPlan', 'ClusterSpec', 'builders', 'Workload'}\n"
        "assert public <= set(dir(lightning_autosync))\n"
    )


def test_fabric_is_told_that_operators_are_split_under_the_trainer_only() -> None:
    with pytest.raises(PlanError, match="strategy: 'autoddl' splits operators under the Trainer only; allowed with Fa"):
        Fabric(accelerator="cpu", devices=2, strategy="autoddl")


@pytest.mark.parametrize("framework", ["lightning.pytorch", "pytorch_lightning"])
def test_backward_is_in_step_with_the_frameworks(framework: str) -> None:
    """The one method that is written anew makes all calls of the original, in its order."""
    original = pytest.importorskip(f"{framework}.strategies.strategy").Strategy.backward
    from lightning_autosync.strategy.mixin import AutoSyncMixin

    ours = [call for call in calls(AutoSyncMixin.backward) if call not in OWN]
    assert ours == calls(original)
    assert len(ours) == 5


OWN = ("self._replica.backward", "self._shares.before_backward", "self._backward_in_parts")
"""Calls of this package."""


def calls(function: object) -> list[str]:
    """What a function calls, in order."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(node.func) for node in sorted(found, key=lambda node: node.lineno)]
