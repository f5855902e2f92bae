"""The device on which a worker trains, and how NCCL accepts several workers on one GPU."""

from __future__ import annotations

import os
import socket
from typing import Literal

from lightning_autosync.errors import DocumentError

Device = Literal["cpu", "cuda"]
BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of a worker's process group, by device."""


def use_device(device: Device) -> None:
    """Make this worker's GPU the current one, if workers train on GPUs; call before the process group is made.

    Workers of a host use its GPUs in the order of their local ranks. NCCL refuses two ranks on one GPU of one host. So
    if a host has more workers than GPUs, those that share one seem to be on different hosts, and NCCL connects them
    by sockets.

    Raises:
        DocumentError: this worker finds no GPU.
    """
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
        raise DocumentError(f"device: cuda: host {socket.gethostname()} has no usable GPU ({build}); use device=cpu")
    turn, index = divmod(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    torch.cuda.set_device(index)
    if turn:
        # Emulated nodes have one host name.
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{os.environ['GROUP_RANK']}-{turn}"
