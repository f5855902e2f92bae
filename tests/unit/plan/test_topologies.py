"""A topology is one registered object; everything else asks the registry."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.errors import PlanError
from lightning_autosync.plan import SyncPlan, builders, compile_plan, topologies
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.plan.topologies import MODES
from lightning_autosync.report.figures.plan import method_of
from lightning_autosync.search.features import PlanFeatures
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(name="layers", variables=tuple(Variable(name=f"layer{i}", shape=(64, 64)) for i in range(4)))
CLUSTER = ClusterSpec.uniform(4, bandwidth="100 Mbit/s")

FOREIGN = """
from lightning_autosync.plan.topologies import Method, TreeTopology, register


class Line(TreeTopology):
    name = label = "line"
    encoded_as = "ring"
    offers = (Method("line"),)

    def pays(self, method, facts, dense):
        return facts.ranks > 2

    def parents(self, site, group, root, shard):
        parents = {rank: rank + 1 if rank < root else rank - 1 for rank in range(site.ranks)}
        parents[root] = -1
        return parents, parents


register(Line())
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch):
    """A package elsewhere that registers a topology by an entry point."""
    (tmp_path / "foreign_lines.py").write_text(FOREIGN)
    about = tmp_path / "foreign_lines-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-lines\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lightning_autosync.topologies]\nline = foreign_lines\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    known, offered = dict(topologies._registered), dict(topologies._methods)
    topologies._load.cache_clear()
    yield
    topologies._registered.clear()
    topologies._registered.update(known)
    topologies._methods.clear()
    topologies._methods.update(offered)
    sys.modules.pop("foreign_lines", None)
    topologies._load.cache_clear()


def test_each_file_of_the_package_registers_its_topology() -> None:
    files = {path.stem for path in Path(topologies.__file__).parent.glob("*.py")} - {"__init__", "base"}
    assert files == set(topologies.names())


@pytest.mark.parametrize("name", topologies.names())
def test_a_topology_says_all_that_is_asked(name: str) -> None:
    topology = topologies.find(name)
    assert topology.encoded_as in MODES
    assert {method_of(groups(name)[0])} == {topology.words("all_reduce")}
    assert topology.offers
    assert topology.__class__.__doc__


def groups(topology: str):
    cluster = ClusterSpec.uniform(1, devices=4) if topologies.find(topology).one_node_only else CLUSTER
    return builders.all_reduce(WORKLOAD, cluster, topology=topology).groups


def test_a_package_elsewhere_adds_one(foreign: None) -> None:
    plan = builders.all_reduce(WORKLOAD, CLUSTER, topology="line")
    assert topologies.names()[-1] == "line"  # after those of this package
    schedule = compile_plan(SyncPlan.from_dict(plan.to_dict()), WORKLOAD, CLUSTER)
    assert schedule.messages[0].rounds[0].transfers[1].reduce.parents == (1, -1, 1, 2)
    space = PlanSpace(WORKLOAD, CLUSTER)
    assert space.parameters["layer0/method"][-1] == "line"
    drawn = space.plan(dict(space.baselines()[0]) | {"builder": "composed", "layer0/method": "line"})
    assert "line" in {group.topology for group in drawn.groups}
    assert method_of(plan.groups[0]) == "line"
    assert PlanFeatures(WORKLOAD)(plan).any()
    assert "line" in SyncPlan.json_schema()["$defs"]["Group"]["properties"]["topology"]["enum"]


def test_an_entry_point_that_cannot_be_loaded_is_named(foreign: None, tmp_path: Path) -> None:
    (tmp_path / "foreign_lines.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(PlanError, match=r"entry point 'line' \(foreign_lines\) cannot be loaded: No module"):
        topologies.names()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(PlanError, match=r"topology 'ring' of .*ring: its name .* already registered by .*Ring; rename"):
        topologies.register(type(topologies.find("ring"))())


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_has_features_whatever_its_topology_resembles(foreign: None, mode: str) -> None:
    plan = builders.all_reduce(WORKLOAD, CLUSTER, topology="line")
    type(topologies.find("line")).encoded_as = mode
    assert PlanFeatures(WORKLOAD)(plan).any()


def test_a_topology_must_resemble_one_that_is_known() -> None:
    class Mesh(type(topologies.find("ring"))):  # type: ignore[misc]
        name = encoded_as = "mesh"
        offers = ()

    with pytest.raises(PlanError, match=r"topology 'mesh' of .*: encoded_as is 'mesh'; allowed: all_reduce, "):
        topologies.register(Mesh())


def test_names_that_are_not_registered() -> None:
    with pytest.raises(PlanError, match=r"topology: 'mesh' is not known; allowed: .*ring"):
        topologies.find("mesh")
    with pytest.raises(PlanError, match=r"method: 'mesh' is not known; allowed: .*all_to_all"):
        topologies.method("mesh")


@pytest.mark.parametrize(
    ("rate", "builder", "size"),
    [
        ("100 Mbit/s", "byteps", 32 * 1024),
        ("1 Gbit/s", "byteps", 125_000),  # a millisecond of the link
        ("10 Gbit/s", "byteps", 128 * 1024),
        (None, "byteps", 32 * 1024),
        ("10 Gbit/s", "all_reduce", 32 * 1024),  # a ring has levels, which should overlap
    ],
)
def test_pieces_of_stars_are_as_large_as_links_are_fast(rate: str | None, builder: str, size: int) -> None:
    cluster = ClusterSpec.uniform(4, bandwidth=rate)
    workload = Workload(name="one", variables=(Variable(name="large", shape=(2**19,)),))
    settings = {"topology": "ring"} if builder == "all_reduce" else {}
    schedule = compile_plan(builders.build(builder, workload, cluster, **settings), workload, cluster)
    transfers = schedule.messages[0].rounds[0].transfers
    assert {4 * each.segment for each in transfers} == {size}
