"""What the processes of a `crew.Crew` do in the soak (``tests/soak.py``): short trainings that meet one fault each."""

from __future__ import annotations

import base64
import os
import random
import resource
import signal
import socket
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from sklearn.datasets import load_digits
from strangers import SECRET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tuning_soak_calls import TUNED_EPOCHS, TUNES, tuning

from lightning_autosync import AutoSyncStrategy
from lightning_autosync.relaxed.transport.heartbeat import HeartbeatSettings
from lightning_autosync.search.storages import open_storage
from lightning_autosync.strategy.tuning.report import TuningReport

HEARTBEAT = HeartbeatSettings(interval=0.2, shortest=2.0, longest=4.0, redial=2.0)
TIMEOUT = 6.0
"""Seconds that a rank waits for others; a busy machine may well keep one waiting for some."""
EPOCHS, BATCHES, BATCH = 3, 4, 16
STEPS = EPOCHS * BATCHES
"""Of each rank; there is a checkpoint after each epoch."""
PACE = 0.005
"""Seconds that a step or a trial takes at least, so that there are moments for faults."""
TRIALS = 12
"""Of each process at a study."""
KILL, STOP, PAUSE, DELAY, CUT = "kill", "stop", "pause", "delay", "cut link"
DISK, EXCEPTION, WRONG_RANK, WRONG_PLAN, WRONG_MODEL = (
    "full disk", "exception", "wrong rank", "wrong plan", "wrong model"
)  # fmt: skip
EXACT = {"own choice": None, "native": "all_reduce", "servers": "ps", "trees": "packed_trees"}
RELAXED = {"partial reduce": "partial_reduce", "local SGD": "periodic"}
PLANS: dict[str, str | None] = {**EXACT, **RELAXED}
STUDY, TUNING = "study", "tuning"
_FILE_LIMIT = 2048
"""Bytes after which a full disk takes no more."""
_digits = load_digits()
IMAGES = torch.as_tensor(_digits.images[:768], dtype=torch.float32).flatten(1) / 16
LABELS = torch.as_tensor(_digits.target[:768])


class Injection:
    """The one fault of a job, on the rank that it is for.

    Args:
        fault: ``kind``, ``rank``, ``step`` (0: before the strategy is made), ``after`` (seconds after the step's
            begin), ``seed``; None for no fault.
        rank: of this process.
        store: the crew's, whose own connection is left alone.
    """

    def __init__(self, fault: dict[str, Any] | None, rank: int, store: dist.TCPStore) -> None:
        self.fault = fault if fault is not None and fault["rank"] == rank else None
        self._store = store

    def is_of(self, *kinds: str) -> bool:
        return self.fault is not None and self.fault["kind"] in kinds

    def at(self, step: int) -> None:
        """Count a step, and let the fault happen if it is to happen in this one."""
        self._store.add("steps", 1)
        if self.fault is not None and self.fault["step"] == step and not self.fault.get("moment"):
            self.happen()

    def happen(self) -> None:
        """Let the fault happen now, or after its seconds, if it is not one of another place."""
        assert self.fault is not None
        if self.is_of(EXCEPTION):
            self.note()
            raise ValueError("no luck")
        if self.is_of(DELAY):
            self.note()
            time.sleep(self.fault["after"] * 10)
        elif self.is_of(DISK):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_LIMIT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif self.is_of(KILL, STOP, PAUSE, CUT):
            threading.Timer(self.fault["after"], self._strike).start()

    def note(self) -> None:
        """Tell the soak that the fault has happened."""
        self._store.add("struck", 1)

    def _strike(self) -> None:
        self.note()
        if self.is_of(CUT):
            self._cut()
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.is_of(KILL) else signal.SIGSTOP)

    def _cut(self) -> None:
        """Shut down one TCP connection of this process, whichever it is."""
        assert self.fault is not None
        handles = [int(name) for name in os.listdir("/proc/self/fd")]
        random.Random(self.fault["seed"]).shuffle(handles)
        for handle in handles:
            with suppress(OSError), socket.socket(fileno=os.dup(handle)) as one:
                here, there = one.getsockname(), one.getpeername()
                inet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                if inet and self._store.port not in (here[1], there[1]):
                    one.shutdown(socket.SHUT_RDWR)
                    self._store.add("cut", 1)
                    return


class Digits(LightningModule):
    """A small network on handwritten digits, in whose steps the fault happens."""

    def __init__(self, injection: Injection, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.injection, self.made = injection, 0

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.made += 1
        self.injection.at(self.made)
        time.sleep(PACE)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        count = self.trainer.world_size * BATCHES * BATCH
        return DataLoader(TensorDataset(IMAGES[:count], LABELS[:count]), batch_size=BATCH)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(
    store: dist.TCPStore,
    rank: int,
    size: int,
    rejoin: bool,
    port: int,
    meeting_port: int,
    folder: str,
    mode: str,
    fault: dict[str, Any] | None,
    seed: int = 0,
) -> dict[str, Any]:
    """Train in a mode of `PLANS`, or `TUNING`; how it ended, and the weights (base64 of float32)."""
    store.add("begun", 1)
    injection = Injection(fault, rank, store)
    if injection.is_of(WRONG_RANK):
        rank = (rank + 1) % size
    place: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": 0 if mode == TUNING else rank,  # as if on a host of its own
        "GROUP_RANK": rank if mode == TUNING else 0,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    place |= {"AUTOSYNC_PORT": meeting_port, "AUTOSYNC_SECRET": SECRET.decode()}
    os.environ.update({name: str(value) for name, value in place.items()})
    handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, 1)  # Lightning and torch tell at length of what comes here on purpose
    os.dup2(handle, 2)
    torch.manual_seed(0)
    tunes = mode == TUNING
    error, module = "", Digits(injection, 24 if injection.is_of(WRONG_MODEL) else 32)
    try:
        injection.at(0)
        with tuning(rank, injection, seed) if tunes else nullcontext():
            trainer = _tuning_trainer(size) if tunes else _trainer(mode, size, folder, injection.is_of(WRONG_PLAN))
            trainer.fit(module)
    except Exception as cause:
        error = f"{type(cause).__name__}: {cause}"
    values = torch.cat([value.detach().flatten() for value in module.parameters()]).numpy()
    weights = base64.b64encode(values.astype(np.float32).tobytes()).decode()
    report = _report(module) if tunes else None
    told = {"trials": 0, "tuning": ""} if report is None else {"trials": len(report.trials), "tuning": str(report)}
    return {"error": error, "weights": weights, "steps": module.made, **told}


def _trainer(mode: str, size: int, folder: str, wrong: bool) -> Trainer:
    plan, patience = PLANS[mode], {}
    if wrong:
        plan = "ps" if plan != "ps" else "all_reduce"
    if plan in RELAXED.values():
        patience = {"heartbeat": HEARTBEAT, "stall": TIMEOUT}
    semantics: Any = "relaxed" if mode in RELAXED else "exact"
    strategy = AutoSyncStrategy(plan=plan, semantics=semantics, timeout=timedelta(seconds=TIMEOUT), **patience)
    return Trainer(
        accelerator="cpu",
        devices=size,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        callbacks=[ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1)],
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _tuning_trainer(size: int) -> Trainer:
    strategy = AutoSyncStrategy(tuning=TUNES, timeout=timedelta(seconds=2 * TIMEOUT))  # rank 0 searches for plans
    return Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=size,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        max_epochs=TUNED_EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _report(module: LightningModule) -> TuningReport | None:
    """What a job says of its tuning; None if it ended before training."""
    with suppress(RuntimeError):  # the module had no Trainer yet
        return module.trainer.strategy.report()  # type: ignore[no-any-return, attr-defined]
    return None


def keep_study(
    store: dist.TCPStore, rank: int, size: int, rejoin: bool, path: str, fault: dict[str, Any] | None
) -> dict[str, Any]:
    """Tell `TRIALS` trials to a study that all ranks share; count those that it has taken."""
    store.add("begun", 1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    injection, error = Injection(fault, rank, store), ""
    try:
        study = optuna.create_study(storage=open_storage(path), study_name="soak", load_if_exists=True)
        for number in range(TRIALS):
            injection.at(number)
            time.sleep(PACE)
            trial = study.ask()
            trial.set_user_attr("rank", rank)
            study.tell(trial, trial.suggest_float("x", 0, 1))
            store.add(f"told{rank}", 1)
    except Exception as cause:
        error = f"{type(cause).__name__}: {cause}"
    return {"error": error, "weights": "", "steps": store.add(f"told{rank}", 0)}


def told_trials(path: Path) -> dict[int, int]:
    """Complete trials in a study by the rank that told them."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(storage=open_storage(path), study_name="soak")
    found: dict[int, int] = {}
    for trial in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,)):
        rank = trial.user_attrs["rank"]
        found[rank] = found.get(rank, 0) + 1
    return found
