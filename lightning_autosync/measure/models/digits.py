"""The images of digits that come with scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_autosync.errors import needed_for


def load_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] with values from 0 to 1, and labels [1797] from 0 to 9.

    Raises:
        MissingPackageError: scikit-learn is not installed.
    """
    with needed_for("The data of digits"):
        from sklearn import datasets
    found = datasets.load_digits()
    return torch.as_tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.as_tensor(found.target)
