"""Known models against the known facts about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_autosync.errors import WorkloadError
from lightning_autosync.workload import Workload, capture, catalogue

# (arguments, parameters, digest of names and shapes), both taken from the models themselves as built by
# torchvision 0.28 and transformers 5.23.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "vgg16": ("vgg16", {}, 138_357_544, "905349280414"),
    "resnet50": ("resnet50", {}, 25_557_032, "f55d40a0a9ba"),
    "resnet101": ("resnet101", {}, 44_549_160, "41f5e4a32c17"),
    "densenet121": ("densenet121", {}, 7_978_856, "90a3e2f9411f"),
    "densenet169": ("densenet169", {}, 14_149_480, "fc39809db857"),
    "densenet201": ("densenet201", {}, 20_013_928, "4bebc4c7a21d"),
    "inception_v3": ("inception_v3", {}, 23_834_568, "5020ecd09ec4"),
    "inception_v3 auxiliary": ("inception_v3", {"aux_logits": True}, 27_161_264, "4d5c2674bf23"),
    "bert_base": ("bert_base", {}, 109_482_240, "1e8e12f81074"),
    "bert_large": ("bert_large", {}, 335_141_888, "687231c04615"),
    "gpt": ("gpt", {}, 124_439_808, "5c3d1595075a"),
}


def parameters(workload: Workload) -> int:
    return sum(variable.numel for variable in workload.variables)


def macs(name: str, **arguments: Any) -> float:
    """Multiply-accumulates of one sample, at two operations a second each."""
    return catalogue.build(name, batch_size=1, flops_per_second=2.0, **arguments).forward_time


@pytest.mark.parametrize(("name", "chosen", "count", "digest"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_names_and_shapes_are_the_published_ones(name: str, chosen: dict[str, Any], count: int, digest: str) -> None:
    workload = catalogue.build(name, **chosen)
    assert parameters(workload) == count
    assert workload.variables_fingerprint == digest


# torchvision's own table of weights.
GIGA_MACS = {"vgg16": 15.47, "resnet50": 4.09, "resnet101": 7.80, "densenet121": 2.83, "inception_v3": 5.71}


@pytest.mark.parametrize(("name", "giga"), GIGA_MACS.items())
def test_work_is_the_published_one(name: str, giga: float) -> None:
    assert macs(name) == pytest.approx(giga * 1e9, rel=2e-3)


def test_transformer_work_is_parameters_and_attention() -> None:
    tokens, width, layers = 128, 768, 12
    body = layers * (12 * width**2) * tokens + width**2
    assert macs("bert_base") == body + layers * 2 * tokens**2 * width


def test_ncf_has_the_size_of_its_reference_and_row_sparse_tables() -> None:
    workload = catalogue.build("ncf")
    assert parameters(workload) == 31_832_577
    kinds = {variable.name: variable.kind for variable in workload.variables}
    tables = {name for name, kind in kinds.items() if kind == "row_sparse"}
    assert tables == {f"{part}_{side}_embed.weight" for part in ("mf", "mlp") for side in ("user", "item")}


def test_rows_touched_are_what_uniform_draws_touch() -> None:
    torch.manual_seed(0)
    counts = [torch.randint(5000, (1024,)).unique().numel() for _ in range(50)]
    workload = catalogue.build("ncf", users=5000, batch_size=1024)
    assert workload.variable("mf_user_embed.weight").rows == pytest.approx(sum(counts) / 50, rel=0.01)


def test_a_batch_that_touches_most_rows_makes_the_table_dense() -> None:
    table = catalogue.build("ncf", users=100, batch_size=1024).variable("mf_user_embed.weight")
    assert (table.kind, table.rows) == ("dense", None)


@pytest.mark.parametrize("name", catalogue.names())
def test_times_follow_the_work(name: str) -> None:
    workload = catalogue.build(name)
    assert workload.backward_time == pytest.approx(2 * workload.forward_time)
    ready = [variable.ready for variable in workload.variables]
    assert None not in ready
    assert ready == sorted(ready, reverse=True)
    assert workload.ready_order == tuple(variable.name for variable in reversed(workload.variables))
    assert workload.ready_order[-1] == workload.variables[0].name
    assert workload.variables[0].ready == pytest.approx(workload.backward_time)


@pytest.mark.parametrize("name", catalogue.names())
def test_times_scale_with_the_batch_and_the_rate(name: str) -> None:
    base = catalogue.build(name, batch_size=4)
    assert catalogue.build(name, batch_size=8).forward_time == pytest.approx(2 * base.forward_time)
    fast = catalogue.build(name, batch_size=4, flops_per_second=2 * catalogue.FLOPS_PER_SECOND)
    assert fast.backward_time == pytest.approx(base.backward_time / 2)


def test_the_last_layer_of_vgg16_is_ready_first_and_early() -> None:
    workload = catalogue.build("vgg16")
    assert workload.ready_order[0] == "classifier.6.bias"
    assert workload.variable("classifier.0.weight").ready < 0.01 * workload.backward_time


def test_arguments_shape_the_model() -> None:
    short = catalogue.build("bert_base", layers=3, tokens=64)
    assert parameters(short) == 109_482_240 - 9 * 7_087_872
    tiny = catalogue.build("gpt", layers=2, width=8, vocab=20, context=16)
    assert parameters(tiny) == 20 * 8 + 16 * 8 + 2 * (12 * 8 * 8 + 13 * 8) + 2 * 8
    assert catalogue.build("resnet50", classes=10).variable("fc.weight").shape == (10, 2048)
    assert catalogue.build("ncf", hidden=[32, 8]).variable("final.weight").shape == (1, 8 + 64)


def test_the_description_agrees_with_a_run() -> None:
    """A small NeuMF built from the described shapes touches the rows that the description expects."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mf_user_embed = nn.Embedding(4000, 4)
            self.mf_item_embed = nn.Embedding(3000, 4)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            return (self.mf_user_embed(batch[0]) * self.mf_item_embed(batch[1])).sum()

    torch.manual_seed(1)
    batch = (torch.randint(4000, (256,)), torch.randint(3000, (256,)))
    run = capture(Tables(), batch, steps=1, warmup=0)
    described = catalogue.build("ncf", users=4000, items=3000, factors=4, batch_size=256)
    for variable in run.variables:
        expected = described.variable(variable.name)
        assert (variable.kind, variable.shape) == (expected.kind, expected.shape)
        assert variable.rows == pytest.approx(expected.rows, rel=0.03)


def test_arguments_are_listed_with_defaults() -> None:
    assert catalogue.arguments("vgg16") == {"batch_size": 32, "resolution": 224, "classes": 1000}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("vgg17", {}, r"no model 'vgg17' in the catalogue; did you mean 'vgg16'\? allowed: vgg16, "),
    ("vgg16", {"depth": 3}, "vgg16: unknown argument 'depth'; allowed: flops_per_second, batch_size, "),
    ("vgg16", {"batch_size": 0}, "vgg16: batch_size must be a whole number, at least 1, got 0"),
    ("vgg16", {"batch_size": 1.5}, "batch_size must be a whole number"),
    ("vgg16", {"batch_size": True}, "batch_size must be a whole number"),
    ("vgg16", {"resolution": 16}, "resolution: too small"),
    ("vgg16", {"flops_per_second": 0.0}, "flops_per_second must be positive"),
    ("vgg16", {"flops_per_second": float("nan")}, "flops_per_second must be positive"),
    ("vgg16", {"flops_per_second": "fast"}, "flops_per_second must be positive"),
    ("inception_v3", {"aux_logits": 1}, "aux_logits must be true or false, got 1"),
    ("ncf", {"hidden": "256"}, "hidden must be a list of whole numbers"),
    ("ncf", {"hidden": []}, "hidden must be a list of whole numbers"),
    ("bert_base", {"tokens": 513}, "tokens must be at most 512, got 513"),
    (
        "vgg16",
        {"flops_per_second": 1e-6},
        "vgg16: with these arguments, forward_time: .*less than or equal to 1000000000000",
    ),
    ("vgg16", {"flops_per_second": 5e-324}, "vgg16: with these arguments, "),
    ("bert_base", {"vocab": 10**17}, "bert_base: with these arguments, .*less than or equal to"),
    ("bert_base", {"vocab": 10**400}, "bert_base: with these arguments, "),
]


@pytest.mark.parametrize(("name", "chosen", "message"), REFUSED)
def test_what_cannot_be_built_is_refused(name: str, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        catalogue.build(name, **chosen)
