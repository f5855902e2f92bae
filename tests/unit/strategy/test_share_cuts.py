"""How batches are cut, and which shares and loaders are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_autosync import AutoDDLStrategy, AutoSyncFabricStrategy, AutoSyncStrategy, GlobalStream, builders
from lightning_autosync.errors import DocumentError, PlanError
from lightning_autosync.strategy.settings import StrategySettings
from lightning_autosync.strategy.shares.auto import AutoShares, open_shares
from lightning_autosync.strategy.shares.batch_shares import BatchShares
from lightning_autosync.strategy.shares.cuts import divide, divide_batch, read_shares


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [
        (16, (1, 1, 2, 4), [2, 2, 4, 8]),
        (10, (2, 2, 4, 8), [1, 1, 3, 5]),
        (2, (2, 2, 4, 8), [0, 0, 1, 1]),
        (7, (0.1, 0.2, 0.7), [1, 1, 5]),
        (10, (0.1, 0.2, 0.7), [1, 2, 7]),
        (0, (1, 1), [0, 0]),
    ],
)
def test_parts_are_proportional_and_make_the_whole(total: int, shares: tuple[float, ...], parts: list[int]) -> None:
    assert divide(total, shares) == parts


def test_no_part_of_a_short_batch_is_above_that_of_a_full_one() -> None:
    for shares in ([3, 5, 7, 1], [1, 1, 1], [2, 9, 4, 4, 1]):
        for total in range(sum(shares)):
            parts = divide(total, shares)
            assert sum(parts) == total
            assert all(part <= share for part, share in zip(parts, shares, strict=True))


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [(64, (1, 1, 2, 4), [8, 8, 16, 32]), (64, (1, 1.2), [28, 36]), (6, (16, 16, 8), [2, 4, 0]), (3, (8, 8), [3, 0])],
)
def test_parts_are_multiples_of_a_micro_batch(total: int, shares: Any, parts: list[int]) -> None:
    assert divide(total, shares, 4) == parts


@pytest.mark.parametrize(
    ("shares", "unit", "message"),
    [
        (
            (1, 1),
            24,
            "micro_batch: 24 does not divide 64, the number of samples in a global batch (batch_size times the number "
            "of ranks, 2); use 16, for example, or another batch_size",
        ),
        ((1, 20), 16, "batch_shares: rank 0 would get none of the 4 micro-batches of 16 samples of a global batch"),
    ],
)
def test_global_batches_that_cannot_be_cut_into_micro_batches(shares: Any, unit: int, message: str) -> None:
    with pytest.raises(PlanError, match="^" + re.escape(message)):
        divide_batch(64, shares, unit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch": 4}, "micro_batch: it has no effect without batch_shares"),
        ({"micro_batch": 0, "batch_shares": "auto"}, "micro_batch: 0 is not a number of samples"),
        ({"micro_batch": True, "batch_shares": "auto"}, "micro_batch: True is not"),
        ({"micro_batch": 2.0, "batch_shares": "auto"}, "micro_batch: 2.0 is not"),
    ],
)
def test_wrong_micro_batches_are_refused(arguments: dict[str, Any], message: str) -> None:
    for strategy in (AutoSyncStrategy, AutoSyncFabricStrategy):
        with pytest.raises(DocumentError, match="^" + re.escape(message)):
            strategy(**arguments)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fast", "batch_shares: 'fast' is not a list of numbers; allowed: 'auto', or one number above 0"),
        ([], "batch_shares: [] is not a list"),
        (3, "batch_shares: 3 is not a list"),
        ([1, 0], "batch_shares[1]: 0 is not a number above 0"),
        ([-1.0, 2], "batch_shares[0]: -1.0 is not"),
        ([1, float("nan")], "batch_shares[1]: nan is not"),
        ([1, True], "batch_shares[1]: True is not"),
        ([1, "2"], "batch_shares[1]: '2' is not"),
        ([0.5, 0.3], "batch_shares: the fractions sum to 0.8, not to 1"),
    ],
)
def test_wrong_shares_are_refused(value: Any, message: str) -> None:
    for strategy in (AutoSyncStrategy, AutoSyncFabricStrategy):
        with pytest.raises(DocumentError, match="^" + re.escape(message)):
            strategy(batch_shares=value)


def test_allowed_shares() -> None:
    assert read_shares([1, 1, 2, 4]) == (1.0, 1.0, 2.0, 4.0)
    assert read_shares((0.25, 0.75)) == (0.25, 0.75)
    assert (read_shares("auto"), read_shares(None)) == ("auto", None)


def test_shares_need_steps_that_ranks_make_together() -> None:
    relaxed = next(iter(builders.relaxed_names()))
    with pytest.raises(DocumentError, match=r"^batch_shares: ranks do not make their steps together under builder"):
        AutoSyncStrategy(relaxed, semantics="relaxed", batch_shares="auto")
    with pytest.raises(DocumentError, match=r"^batch_shares: AutoDDLStrategy splits operators"):
        AutoDDLStrategy(batch_shares=[1, 2])


def test_there_is_one_share_for_each_rank() -> None:
    with pytest.raises(PlanError, match=r"^batch_shares: 2 numbers were given, but the job has 3 ranks"):
        open_shares(StrategySettings(batch_shares=(1.0, 2.0)), 0, 3, torch.device("cpu"))
    assert open_shares(StrategySettings(), 0, 3, torch.device("cpu")) is None
    with pytest.warns(UserWarning, match="micro_batch has no effect in a job with one rank"):
        assert open_shares(StrategySettings(batch_shares="auto", micro_batch=4), 0, 1, torch.device("cpu")) is None


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


class Own(BatchSampler):
    """A batch sampler that may do anything."""


def distributed(samples: int, batch_size: int, drop_last: bool = False) -> DataLoader[int]:
    data = range(samples)
    sampler = DistributedSampler(data, num_replicas=3, rank=0)  # type: ignore[arg-type]
    return DataLoader(data, batch_size, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2, 3], "a list cannot be cut"),
        (DataLoader(Stream(), 2), "Stream is an IterableDataset"),
        (DataLoader(GlobalStream(Stream()), 4), "a GlobalStream needs DataLoader(drop_last=True)"),
        (DataLoader(range(8), batch_size=None), "a DataLoader without automatic batches cannot be cut"),
        (DataLoader(range(8), batch_sampler=Own(SequentialSampler(range(8)), 2, False)), "a Own cannot be cut"),
        (DataLoader(range(8), 2), "a SequentialSampler does not say which samples other ranks draw"),
        (distributed(2, 4), "there are 2 samples for 3 ranks; use more samples or fewer ranks"),
        (distributed(11, 4, drop_last=True), "there are 11 samples for 3 ranks and global batches of 12"),
        (distributed(9, 1), "rank 0 would get none of the 3 samples of a global batch (its share is 0.0909)"),
    ],
)
def test_loaders_that_cannot_be_cut_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(PlanError, match="^" + re.escape(f"batch_shares: {message}")):
        BatchShares((1.0, 4.0, 6.0), 0).cut_loader(loader)


@pytest.mark.parametrize(("drop_last", "batches"), [(True, 5), (False, 6)])
def test_all_ranks_have_the_same_number_of_batches(drop_last: bool, batches: int) -> None:
    seen = []
    for rank in range(3):
        loader = distributed(62, 4, drop_last)
        sampler = BatchShares((1.0, 2.0, 3.0), rank).cut_loader(loader)
        drawn = list(loader)
        cuts = [sampler.take() for _ in drawn]
        assert len(loader) == len(drawn) == batches
        assert [max(cut.samples, 1) for cut in cuts] == list(map(len, drawn))
        seen += [int(number) for batch, cut in zip(drawn, cuts, strict=True) for number in batch[: cut.samples]]
    assert len(seen) == len(set(seen)) == (60 if drop_last else 62)


def test_a_loader_can_be_cut_again() -> None:
    loader = distributed(24, 4)
    for shares in ((1.0, 2.0, 3.0), (3.0, 2.0, 1.0)):
        BatchShares(shares, 0).cut_loader(loader)
        assert [len(batch) for batch in loader] == [2 * shares[0]] * 2


def test_shares_of_a_stream_that_workers_cut_cannot_change() -> None:
    loader = DataLoader(GlobalStream(Stream()), 4, drop_last=True, num_workers=1)
    with pytest.raises(PlanError, match=r"^batch_shares='auto': the shares of a GlobalStream cannot change with"):
        AutoShares(0, 3, torch.device("cpu")).cut_loader(loader)


def test_shares_of_a_stream_change_from_the_next_batch_on() -> None:
    drawn: list[list[list[int]]] = []
    for rank in range(2):
        shares = AutoShares(rank, 2, torch.device("cpu"))
        loader = DataLoader(GlobalStream(range(29)), 4, drop_last=True)
        sampler = shares.cut_loader(loader)
        own = []
        for _ in range(2):  # passes
            for batch in loader:
                own.append(batch.tolist())
                assert sampler.take().samples == len(batch)
                if len(own) == 2:
                    shares.changes.append((sampler.position, (1, 7)))
        drawn.append(own)
    assert [list(map(len, own)) for own in drawn] == [[4, 4, 1, 1, 1, 1], [4, 4, 7, 7, 7, 7]]
    assert [one + other for one, other in zip(*drawn, strict=True)] == [
        list(range(begin, begin + 8)) for begin in (0, 8, 16)
    ] * 2
