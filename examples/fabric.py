"""The same with Fabric and a loop of one's own. ``python examples/fabric.py``"""

from __future__ import annotations

import torch
from digits import Digits, loaders
from lightning.fabric import Fabric
from torch.nn import functional as F

import lightning_autosync  # noqa: F401 - registers "autosync"


def main() -> None:
    fabric = Fabric(strategy="autosync", accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(0)
    module = Digits()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))
    training, validation = fabric.setup_dataloaders(*loaders())
    for epoch in range(6):
        training.sampler.set_epoch(epoch)
        for images, labels in training:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
    with torch.no_grad():
        hits = torch.tensor([0.0, 0.0])
        for images, labels in validation:
            hits += torch.tensor([float((model(images).argmax(dim=1) == labels).sum()), float(len(labels))])
    correct, total = fabric.all_reduce(hits, reduce_op="sum").tolist()
    fabric.print(f"validation accuracy {correct / total:.3f}")


if __name__ == "__main__":
    main()
