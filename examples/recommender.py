"""A large embedding of which a step touches few rows: only those travel. ``python examples/recommender.py``"""

from __future__ import annotations

import time

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_autosync  # noqa: F401 - registers "autosync"

USERS, ITEMS, WIDTH = 60_000, 40_000, 32


class Recommender(L.LightningModule):
    """Predicts whether a user likes an item, from both embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        users, items, likes = batch
        features = torch.cat([self.users(users), self.items(items)], dim=1)
        loss = F.binary_cross_entropy_with_logits(self.head(features)[:, 0], likes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batches() -> DataLoader:
    """Users like the items whose number has their own parity."""
    draw = torch.Generator().manual_seed(0)
    users = torch.randint(0, USERS, (20_480,), generator=draw)
    items = torch.randint(0, ITEMS, (20_480,), generator=draw)
    return DataLoader(TensorDataset(users, items, ((users + items) % 2 == 0).float()), batch_size=256)


def main() -> None:
    for strategy in ("ddp_fork", "autosync_fork"):
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        start = time.perf_counter()
        trainer.fit(Recommender(), batches())
        seconds = time.perf_counter() - start
        print(f"{strategy}: 40 steps in {seconds:.1f} s, loss {float(trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
