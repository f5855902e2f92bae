"""Micro-measurements of what hosts add to the cost of communication. No plan is measured. All are collective."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.engine import Engine, StepOverlap, defer_steps
from lightning_autosync.engine.codecs import make_codec
from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.engine.connections import connect_pairs
from lightning_autosync.engine.exchanges.rows import Rows, add_rows
from lightning_autosync.engine.exchanges.trees import TreeExchange
from lightning_autosync.engine.row_gradients import touched_rows
from lightning_autosync.engine.transport import UP, Frame, Peer, Transport
from lightning_autosync.errors import ExchangeError
from lightning_autosync.measure.conditions import usable_cores, windows_restart
from lightning_autosync.measure.models.paced import PacedModule
from lightning_autosync.measure.probe.hosts import core_seconds
from lightning_autosync.plan import Group, SyncPlan, compile_plan
from lightning_autosync.plan.schedule import Message, Round, TreeTransfer
from lightning_autosync.plan.spec import Compressor
from lightning_autosync.plan.trees import Tree
from lightning_autosync.workload import Variable, Workload, variable_names

PIECES = 2
"""Number of pieces into which the backend cuts each part of a ring, however small."""
_ROUNDS = 60
_ELEMENTS = 1 << 20
"""Elements of a 4 MiB float32 buffer. Like gradients, it is larger than a core's private caches."""
_SMALL_FRAMES, _SMALL_ELEMENTS = 512, 64
_LARGE_FRAMES, _LARGE_ELEMENTS = 16, 1 << 16
_MESSAGES = 64
_BOUNCES = 200
_TIMEOUT = 60.0
_NUMBERS = 64
"""Elements in each piece of a small all-reduce. The backend would not send empty pieces."""
_FEW_ROWS, _WIDTH = 8, 32
_TOUCHED = 8
"""One in so many rows of a table is touched."""
_TRIES = 3
_IN_A_ROW = 4
"""Sets of rows that come one after the other, in the transfers of a message. The first one fills the caches."""
_COLD = 15
"""Runs of an action for which the core's caches are emptied."""
_CODECS = ("fp16", "bf16", "int8", "topk")


def measure_collectives() -> dict[str, dict[str, float]]:
    """Time small collectives: ``ring``, an all-reduce with no empty piece, and ``all_to_all`` of one number per pair.

    Returns:
        For each collective ``seconds`` (the fastest tenth of rounds, slowest rank) and ``core`` (core-seconds of a
        rank, mean over ranks). Other processes can only slow a round down, so the fast rounds count.
    """
    numbers = torch.zeros(_NUMBERS * PIECES * dist.get_world_size())
    sources, targets = torch.zeros(dist.get_world_size()), torch.zeros(dist.get_world_size())
    return {
        "ring": _time_collective(lambda: dist.all_reduce(numbers)),
        "all_to_all": _time_collective(lambda: dist.all_to_all_single(targets, sources)),
    }


def _time_collective(collective: Callable[[], object]) -> dict[str, float]:
    for _ in range(5):
        collective()
    times = []
    busy = time.process_time()
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        collective()
        times.append(time.perf_counter() - start)
    busy = (time.process_time() - busy) / _ROUNDS
    found = gather_json([sorted(times)[_ROUNDS // 10], busy])
    return {"seconds": max(each[0] for each in found), "core": statistics.mean(each[1] for each in found)}


def measure_costs(leaders: Sequence[int]) -> dict[str, Any]:
    """Measure memory, codecs, rows, the transport and the engine, in SI units; rates are in bytes/s.

    Local work is measured in core-seconds on all ranks at once. A core does less per second of its own time while its
    neighbours are busy, and during synchronization they are.
    """
    one, other = (leaders[0], leaders[1]) if len(leaders) > 1 else (0, 1)
    costs: dict[str, Any] = {}
    for measure in (_memory, _rows, _coding):
        dist.barrier()
        costs |= _mean(gather_json(measure()))
    if dist.get_world_size() > 1:
        costs |= _frames(one, other, costs["reduce_rate"])
        costs |= measure_engine()
    restarts = any(gather_json(windows_restart()))
    return {**costs, "collectives": _backend_threads(), "cores": usable_cores(), "restarts": restarts}


def _backend_threads() -> int:
    """How many collectives the backend runs at once: each needs one of its threads."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return int(backend.options._threads)  # type: ignore[attr-defined]


def _mean(found: Sequence[Any]) -> Any:
    """The mean over ranks of a number, or of each number in nested mappings."""
    if isinstance(found[0], dict):
        return {key: _mean([one[key] for one in found]) for key in found[0]}
    return statistics.mean(found)


def _core_seconds(action: Callable[[], object], repeats: int = 7) -> float:
    """Core-seconds of this thread for an action, the median of ``repeats`` runs."""
    return statistics.median(core_seconds(action) for _ in range(repeats))


def _rate(action: Callable[[], object], size: float) -> float:
    """Bytes per core-second of an action over ``size`` bytes."""
    return size / _core_seconds(action)


def _memory() -> dict[str, Any]:
    one, other = torch.rand(4 * _ELEMENTS), torch.rand(4 * _ELEMENTS)
    size = one.numel() * one.itemsize
    return {"copy_rate": _rate(lambda: one.copy_(other), size), "reduce_rate": _rate(lambda: one.add_(other), size)}


def _rows() -> dict[str, float]:
    """Bytes/s when finding the touched rows of a table; half of the core-seconds to unpack, add and pack a small set.

    A step uses each table once, and meanwhile other threads use the core: its caches are as good as empty.
    """
    table = torch.zeros(_ELEMENTS // _WIDTH, _WIDTH)
    table[::_TOUCHED] = 1.0
    own, other = (Rows(torch.arange(_FEW_ROWS) + first, torch.ones(_FEW_ROWS, _WIDTH), 1) for first in (0, 1))
    wire = other.packed(len(table))

    def merge() -> None:
        for _ in range(_IN_A_ROW):
            add_rows([own, Rows.unpacked(wire, _WIDTH, torch.float32, len(table))]).packed(len(table))

    return {
        "scan_rate": table.nbytes / _cold_seconds(lambda: touched_rows(table)),
        "merge_core": _cold_seconds(merge) / _IN_A_ROW / 2,
    }


def _cold_seconds(action: Callable[[], object]) -> float:
    """Core-seconds of this thread for an action whose code and data are in none of its core's own caches; a median."""
    others = torch.zeros(8 * _ELEMENTS)  # 32 MiB
    times = []
    for _ in range(_COLD):
        others.add_(1)
        times.append(core_seconds(action))
    return statistics.median(times)


def _coding() -> dict[str, Any]:
    encode, decode = {}, {}
    values = torch.randn(_ELEMENTS)
    size = values.numel() * values.itemsize
    for kind in _CODECS:
        codec = make_codec(Compressor(kind=kind), _ELEMENTS, 0)
        assert codec is not None
        wire = torch.zeros(codec.size, dtype=torch.uint8)
        encode[kind] = _rate(lambda: codec.encode(values, wire), size)  # noqa: B023 - called at once
        decode[kind] = _rate(lambda: codec.decode(wire, values), size)  # noqa: B023
    rows = [Rows(torch.randperm(1 << 16)[: 1 << 14].sort().values, torch.randn(1 << 14, 32), 1) for _ in range(2)]
    encode["rows"] = sum(part.values.nbytes for part in rows) / _cold_seconds(lambda: add_rows(rows))
    table, one = torch.zeros(1 << 16, 32), rows[0]
    decode["rows"] = one.values.nbytes / _cold_seconds(lambda: table.index_copy_(0, one.indices, one.values))
    matrix, factor = values.view(1024, -1), torch.randn(_ELEMENTS // 1024, 4)
    encode["powersgd"] = _rate(lambda: matrix @ factor, size)
    decode["powersgd"] = _rate(lambda: (matrix @ factor) @ factor.t(), size)
    return {"encode": encode, "decode": decode}


class _Echo:
    """Receives frames and calls ``answer`` for each."""

    completed = 0

    def __init__(self, buffer: memoryview, answer: Callable[[Frame], None]) -> None:
        self._buffer = buffer
        self._answer = answer
        self.error: ExchangeError | None = None

    def destination(self, peer: int, frame: Frame) -> memoryview:
        return self._buffer[: frame.size]

    def arrived(self, peer: int, frame: Frame) -> None:
        self._answer(frame)

    def failed(self, error: ExchangeError) -> None:
        self.error = error
        self._answer(Frame(0, 0, 0, 0, UP, 0))

    def left(self, peer: int, step: int) -> None:
        return None


def _frames(one: int, other: int, reduce_rate: float) -> dict[str, float]:
    """Measure the transports of two ranks.

    Returns:
        ``lone`` (one-way seconds of a frame for which the receiver waits), ``frame_core`` (core-seconds at either end
        for each small frame when many are in flight on a tree), ``byte_core`` (the same for each byte of large frames)
        and ``exchange_core`` (core-seconds of a rank to start and complete a message, without its frames).
    """
    rank = dist.get_rank()
    sockets = connect_pairs([(min(one, other), max(one, other))], None, None, 30.0)
    ends: dict[str, float] = {}
    if rank in (one, other):
        (connection,) = sockets.values()
        own = int(rank == other)  # within this transport, the two ranks are ranks 0 and 1
        transport = Transport({Peer(1 - own): connection})
        peer = other if rank == one else one
        lone = _bounce(transport, own, lambda: _meet(peer, rank == one))
        small = _make_sum(transport, own, 1, pieces=_SMALL_FRAMES, size=_SMALL_ELEMENTS)
        large = _make_sum(transport, own, 2, pieces=_LARGE_FRAMES, size=_LARGE_ELEMENTS)
        single = [_make_sum(transport, own, 3 + channel, 1, _SMALL_ELEMENTS) for channel in range(_MESSAGES)]
        _meet(peer, rank == one)
        ends = {"lone": lone, "frame_core": _core([small]) / _SMALL_FRAMES / 2}
        ends |= {"large_core": _core([large]) / _LARGE_FRAMES / 2}
        # A rank sends and receives one frame for each of these messages.
        ends |= {"exchange_core": max(0.0, _core(single) / _MESSAGES - 2 * ends["frame_core"])}
    found = gather_json(ends)
    if rank in (one, other):
        transport.close()
    mean = {key: (found[one][key] + found[other][key]) / 2 for key in found[one]}
    # A piece travels there and back, so it has four ends. One of them also adds, which is a separate constant.
    size = _LARGE_ELEMENTS * 4
    byte = (mean.pop("large_core") - mean["frame_core"]) / size - 1 / reduce_rate / 4
    return {**mean, "byte_core": max(0.0, byte)}


def _bounce(transport: Transport, own: int, meet: Callable[[], None]) -> float:
    """One-way seconds of a single frame: half a round trip, fastest tenth."""
    begins, peer = own == 0, Peer(1 - own)
    payload = memoryview(bytearray(1))
    times: list[float] = []
    done = threading.Event()
    last = 0.0

    def send() -> None:
        transport.send(peer, Frame(0, 0, 0, 0, UP, 1), payload, (0.0,))

    def arrived(frame: Frame) -> None:
        nonlocal last
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if len(times) < _BOUNCES or not begins:
            send()
        if len(times) == _BOUNCES:
            done.set()

    receiver = _Echo(memoryview(bytearray(1)), arrived)
    transport.register(0, receiver)
    meet()
    last = time.perf_counter()
    if begins:
        transport.submit(send)
    if not done.wait(_TIMEOUT) or receiver.error is not None:
        raise receiver.error or ExchangeError(f"probe: a rank did not answer within {_TIMEOUT:g} s")
    return sorted(times[1:])[_BOUNCES // 10] / 2  # the first interval includes the start of either end


def _make_sum(transport: Transport, own: int, channel: int, pieces: int, size: int) -> TreeExchange:
    """A tree sum over two ranks: ``pieces`` frames of ``size`` elements there and back, all in flight at once."""
    tree = Tree((-1, 0))
    whole = Round(pieces * size, (TreeTransfer(0, pieces * size, tree, tree, size),))
    message = Message(0, "probe", ("probe",), pieces * size, "float32", 0, 1, Compressor(), 0, (whole,))
    return TreeExchange(transport, channel, own, message, whole, torch.zeros(pieces * size), _TIMEOUT)


def _core(exchanges: Sequence[TreeExchange]) -> float:
    """Core-seconds of a step on this rank, in which all start at once; the least of ``_TRIES``."""
    best = float("inf")
    for _ in range(_TRIES):
        start = time.process_time()
        for exchange in exchanges:
            exchange.start()
        for exchange in exchanges:
            exchange.wait()
        best = min(best, time.process_time() - start)
    return best


def _meet(peer: int, begins: bool) -> None:
    """Wait until both ends have registered their channels, since a frame for an unknown channel would be an error."""
    token = torch.zeros(1)
    if begins:
        dist.send(token, peer)
        dist.recv(token, peer)
    else:
        dist.recv(token, peer)
        dist.send(token, peer)


_FEW, _MANY, _TOGETHER = 9, 72, 3
_PAUSE = 1e-3
"""Seconds between gradients that come together and the next ones."""
_STEPS = 8
_SHAPES = ((_FEW, 1), (_MANY, 1), (_MANY, _MANY))
"""Gradients and messages of the steps that `measure_engine` compares."""


def measure_engine() -> dict[str, float]:
    """Measure core-seconds of the main thread, with tiny gradients. Collective.

    Differences between steps give ``gradient_core`` (each gradient in a backward pass, including autograd around its
    hook), ``unpack_core`` (each mean that is copied into its gradient afterwards), ``launch_core`` and ``finish_core``
    (each message: its launch in the backward pass, and its end afterwards). The first two compare many gradients with
    few in one message, the others many messages with one. ``pass_core`` is what a backward pass and the wait after it
    take without gradients and messages. ``due_core`` and ``step_core`` are what ``overlap="step"`` adds for each
    gradient and each message.

    Gradients come three at a time, a layer's weight and bias and the weight of its normalization, with pauses between
    layers. After a pause the caches of a core hold what other ranks use: a gradient then costs up to twice as much.
    """
    few, many, separate = (_step(*shape) for shape in _SHAPES)
    found = {
        "gradient_core": max(0.0, many[0] - few[0]) / (_MANY - _FEW),
        "unpack_core": max(0.0, many[1] - few[1]) / (_MANY - _FEW),
        "launch_core": max(0.0, separate[0] - many[0]) / (_MANY - 1),
        "finish_core": max(0.0, separate[1] - many[1]) / (_MANY - 1),
    }
    of_few = _FEW * (found["gradient_core"] + found["unpack_core"]) + found["launch_core"] + found["finish_core"]
    of_few_due, of_many_due, of_separate_due = (
        sum(_overlapping_step(*shape)) - sum(without)
        for shape, without in zip(_SHAPES, (few, many, separate), strict=True)
    )
    return {
        **found,
        "pass_core": max(0.0, sum(few) - of_few),
        "due_core": max(0.0, of_many_due - of_few_due) / (_MANY - _FEW),
        "step_core": max(0.0, of_separate_due - of_many_due) / (_MANY - 1),
    }


def _layers(gradients: int) -> Workload:
    """Layers of `_TOGETHER` tiny gradients, with pauses between them."""
    variables = [
        Variable(name=f"v{number}", shape=(16,), ready=number // _TOGETHER * _PAUSE) for number in range(gradients)
    ]
    return Workload(name="probe", variables=tuple(variables), backward_time=gradients / _TOGETHER * _PAUSE)


def _step(gradients: int, messages: int) -> tuple[float, float]:
    """Core-seconds of the main thread in a backward pass, and then until all gradients hold their means.

    Both are medians over steps, then means over ranks.
    """
    module, engine = _probed(gradients, messages)

    def finish() -> float:
        begin = time.thread_time()
        engine.finish()
        spent = time.thread_time() - begin
        module.zero_grad()
        return spent

    with closing(engine):
        return _typical(module, finish)


def _overlapping_step(gradients: int, messages: int) -> tuple[float, float]:
    """As `_step`, where parameters are due at the end of the backward pass.

    What follows it has their steps, too, without the time of an optimizer that makes all steps at once.
    """
    module, engine = _probed(gradients, messages)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def make_steps() -> float:
        begin = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        steps.settle()
        spent = time.thread_time() - begin
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
        begin = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        return spent - (time.thread_time() - begin)

    with closing(engine), closing(StepOverlap(module)) as steps:
        steps.follow(engine)
        defer_steps(optimizer)
        return _typical(module, make_steps)


def _probed(gradients: int, messages: int) -> tuple[PacedModule, Engine]:
    """A module with so many tiny gradients, and an engine that sums them in messages of equal size."""
    workload = _layers(gradients)
    variables = workload.variables
    cluster = ClusterSpec.uniform(dist.get_world_size(), bandwidth=1e9, name="probe")
    share = gradients // messages
    groups = [
        Group(name=f"g{number}", variables=tuple(v.name for v in variables[number * share : (number + 1) * share]))
        for number in range(messages)
    ]
    plan = SyncPlan(workload=workload.variables_fingerprint, world_size=dist.get_world_size(), groups=tuple(groups))
    module = PacedModule(workload)
    schedule = compile_plan(plan, workload, cluster)
    return module, Engine(variable_names(module), schedule, cluster=cluster, timeout=_TIMEOUT, waits="parameters")


def _typical(module: PacedModule, finish: Callable[[], float]) -> tuple[float, float]:
    """Core-seconds of the main thread in a backward pass, and those that ``finish`` returns after it."""
    times, seed = [], torch.tensor(0)
    for _ in range(_STEPS):
        loss = module(seed)
        start = time.thread_time()
        loss.backward()
        launched = time.thread_time()
        dist.barrier()  # by then most sums have arrived, so that the end of a message is not a wait
        times.append([launched - start, finish()])
    backward, after = zip(*times[1:], strict=True)
    found = gather_json([statistics.median(backward), statistics.median(after)])
    return statistics.mean(each[0] for each in found), statistics.mean(each[1] for each in found)
