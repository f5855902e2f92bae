"""The LightningModule of a bench model."""

from __future__ import annotations

import pytest

from lightning_autosync.measure.models.recipes import model_of
from lightning_autosync.training.rank import BenchModule


@pytest.mark.parametrize("kind", ["transformer", "vgg"])
def test_parameters_and_buffers_go_to_another_device_together(kind: str) -> None:
    module = BenchModule(model_of({"kind": kind}), world_size=1)
    names = [name for name, _ in module.named_parameters()]
    assert names == [name for name, _ in module._inner.named_parameters()]
    module.to("meta")
    found = [*module._inner.parameters(), *module._inner.buffers()]
    assert {each.device.type for each in found} == {"meta"}
