"""A codec is one registered class for plans, and one for the engine; everything else asks the registries."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import codecs as engine_codecs
from lightning_autosync.engine.codecs import BaseCodec, make_codec
from lightning_autosync.errors import PlanError
from lightning_autosync.learned.plan_arrays import COMPRESSORS
from lightning_autosync.plan import AllToAll, Compressor, SyncPlan, builders, codecs, compile_plan
from lightning_autosync.plan.codecs import CodecFormat
from lightning_autosync.plan.space import PlanSpace
from lightning_autosync.replay import Replay
from lightning_autosync.search.features import PlanFeatures
from lightning_autosync.workload import Variable, Workload

WORKLOAD = Workload(name="layers", variables=tuple(Variable(name=f"layer{i}", shape=(64, 64)) for i in range(4)))
CLUSTER = ClusterSpec.uniform(4, bandwidth="100 Mbit/s")

FORMAT = """
from lightning_autosync.documents import Count, Record
from lightning_autosync.plan.codecs import CodecFormat, register


class Options(Record):
    levels: Count = 3


class Coarse(CodecFormat):
    name = "coarse"
    encoded_as = "int8"
    options = Options
    module = "foreign_coarse_engine"

    def encoded_bytes(self, compressor, numel, tail, itemsize):
        return numel - tail + 4 * tail


register(Coarse())
"""

ENGINE = """
import torch
from lightning_autosync.engine.codecs import BaseCodec, register


class CoarseCodec(BaseCodec):
    def __init__(self, compressor, numel, tail):
        super().__init__(compressor, numel, tail)
        self.levels = dict(compressor.options)["levels"]

    def encode(self, values, wire):
        wire[4 * self.tail :].view(torch.int8).copy_(torch.round(values[: self.body] * self.levels))
        self._tail_of(wire, 0).copy_(values[self.body :])

    def decode(self, wire, values):
        values[: self.body] = wire[4 * self.tail :].view(torch.int8) / self.levels
        values[self.body :] = self._tail_of(wire, 0)


register("coarse", CoarseCodec)
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package elsewhere that registers a codec by an entry point."""
    make_codec(Compressor(kind="int8"), 1, 0)  # loads the codecs of this package
    (tmp_path / "foreign_coarse.py").write_text(FORMAT)
    (tmp_path / "foreign_coarse_engine.py").write_text(ENGINE)
    about = tmp_path / "foreign_coarse-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-coarse\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lightning_autosync.codecs]\ncoarse = foreign_coarse\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(codecs, "_registered", dict(codecs._registered))
    monkeypatch.setattr(engine_codecs, "_registered", dict(engine_codecs._registered))
    codecs._load.cache_clear()
    yield
    for name in ("foreign_coarse", "foreign_coarse_engine"):
        sys.modules.pop(name, None)
    codecs._load.cache_clear()
    engine_codecs._find.cache_clear()


def test_a_package_elsewhere_adds_one(foreign: None) -> None:
    plan = builders.all_reduce(WORKLOAD, CLUSTER, compressor={"kind": "coarse", "options": {"levels": 5}})
    plan = SyncPlan.from_dict(plan.to_dict())
    assert plan.groups[0].compressor.options == (("levels", 5),)
    assert codecs.names()[-1] == "coarse"  # after those of this package
    schedule = compile_plan(plan, WORKLOAD, CLUSTER)
    assert isinstance(schedule.messages[0].rounds[0].transfers[0], AllToAll)  # a backend cannot sum it
    assert Replay(WORKLOAD, CLUSTER).predict(schedule).step_time > 0
    assert codecs.find("coarse").encoded_as in COMPRESSORS
    assert PlanFeatures(WORKLOAD)(plan).any()
    assert "coarse" in PlanSpace(WORKLOAD, CLUSTER, semantics="compressed").parameters["layer0/compressor"]
    assert {"coarse"} <= set(SyncPlan.json_schema()["$defs"]["Compressor"]["anyOf"][0]["enum"])
    assert "foreign_coarse_engine" not in sys.modules  # it is imported where it runs
    codec = make_codec(plan.groups[0].compressor, 12, 2)
    assert codec is not None
    values, wire = torch.tensor([0.2, -0.4, *[1.0] * 8, 3.0, 4.0]), torch.empty(codec.size, dtype=torch.uint8)
    codec.encode(values, wire)
    decoded = torch.empty(12)
    codec.decode(wire, decoded)
    assert torch.allclose(decoded, values)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"levels": 0}, "levels.*greater than 0"), ({"depth": 1}, "depth.*Extra inputs")],
)
def test_options_are_checked_by_the_codec(foreign: None, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Compressor(kind="coarse", options=options)


def test_options_have_defaults_and_are_left_out_where_there_are_none(foreign: None) -> None:
    assert Compressor(kind="coarse").model_dump()["options"] == {"levels": 3}
    assert "options" not in Compressor(kind="int8").model_dump()
    with pytest.raises(ValueError, match="options: compressor 'int8' takes no options"):
        Compressor(kind="int8", options={"levels": 3})


def test_a_codec_that_nothing_executes_is_an_error_where_it_runs(
    foreign: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_coarse_engine.py").write_text("")
    compressor = Compressor(kind="coarse")
    with pytest.raises(PlanError, match="compressor: 'coarse' has a CodecFormat but no Codec"):
        make_codec(compressor, 8, 0)


def test_an_unknown_codec_is_named() -> None:
    group = {"name": "all", "variables": ["a"], "compressor": "zip"}
    with pytest.raises(PlanError, match=r"groups\[0\]\.compressor\.kind: 'zip' is not known; allowed: none"):
        SyncPlan.from_dict({"format": SyncPlan.FORMAT, "world_size": 2, "groups": [group]})


class _Nameless(CodecFormat):
    name = "int8"


class _Unlike(CodecFormat):
    name = "new"
    encoded_as = "zip"


@pytest.mark.parametrize(
    ("codec", "message"),
    [(_Nameless(), "codec 'int8' .*Int8 already has this name"), (_Unlike(), "encoded_as is 'zip'; allowed: .*int8")],
)
def test_what_may_not_be_declared(codec: CodecFormat, message: str) -> None:
    codecs.names()
    with pytest.raises(PlanError, match=message):
        codecs.register(codec)


class _NoDecode:
    def __init__(self, compressor: Compressor, numel: int, tail: int) -> None: ...

    def encode(self, values: Tensor, wire: Tensor) -> None: ...


class _Short(BaseCodec):
    def encode(self, values: Tensor) -> None: ...

    def decode(self, wire: Tensor, values: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("name", "codec", "message"),
    [
        ("new", _NoDecode, "codec 'new': .*_NoDecode: decode: it takes 0 positional arguments, but must take"),
        ("new", _Short, "_Short: encode: it takes 2 positional arguments, but must take .: self, values, wire"),
        ("int8", _Short, "codec 'int8': .*_Short: .*Int8Codec already has this name"),
    ],
)
def test_what_may_not_execute_codecs(name: str, codec: type[BaseCodec], message: str) -> None:
    make_codec(Compressor(kind="int8"), 1, 0)
    with pytest.raises(PlanError, match=message):
        engine_codecs.register(name, codec)


def test_each_lossy_codec_of_this_package_runs() -> None:
    for name in codecs.names():
        codec = make_codec(Compressor(kind=name), 8, 1)
        assert (codec is None) == (codecs.find(name).sums == "plain")
