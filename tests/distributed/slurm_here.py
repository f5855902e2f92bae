"""A SLURM whose two nodes are this machine: munged, slurmctld and two slurmd in a temporary folder, as root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "unshare")
NODES = (socket.gethostname(), "localhost")
"""Names of nodes. Both lead to this machine, because ranks find each other by them."""
START = 60.0
"""Seconds in which all nodes must be idle."""
CONFIGURATION = """
ClusterName=here
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
MinJobAge=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=60
"""


def why_not() -> str:
    """Why no SLURM can be started here; empty if one can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{missing[0]} is not installed (Debian: apt-get install slurm-wlm munge)"
    try:
        socket.gethostbyname(NODES[0])
    except OSError:
        return f"the name of this host, {NODES[0]}, does not resolve"
    if len({*NODES}) < len(NODES):
        return "this host has no name but localhost"
    return "" if os.geteuid() == 0 else "SLURM's daemons need root"


@contextmanager
def running_slurm(folder: Path) -> Iterator[Path]:
    """Start the daemons; yields the configuration, whose path clients take from ``SLURM_CONF``.

    Raises:
        AssertionError: the nodes are not idle within `START` seconds; the message has the logs.
    """
    node_lines = [f"NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 State=UNKNOWN" for name in NODES]
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(port=free_port(), folder=folder, nodes="\n".join(node_lines)))
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "socket": "socket"}
    munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    with ExitStack() as stack:
        stack.enter_context(_daemon(["munged", "--foreground", "--force", *munge], folder))
        stack.enter_context(_daemon(["slurmctld", "-D", "-c", "-f", str(path)], folder))
        for name in NODES:
            # A slurmd takes the node that has the name of its host.
            command = f"hostname {name} && exec slurmd -D -c -f {path}"
            stack.enter_context(_daemon(["unshare", "--uts", "sh", "-c", command], folder))
        _wait_until_idle(path, folder)
        yield path


@contextmanager
def _daemon(command: Sequence[str], folder: Path) -> Iterator[None]:
    """A daemon in the foreground, which ends with the block."""
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_idle(path: Path, folder: Path) -> None:
    command = ["timeout", "5", "sinfo", "--noheader", "--Node", "--format=%T"]
    end = time.monotonic() + START
    while time.monotonic() < end:
        told = subprocess.run(command, env={**os.environ, "SLURM_CONF": str(path)}, capture_output=True, text=True)
        if told.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))
    raise AssertionError(f"SLURM's nodes are not idle after {START:g} s: {told.stdout} {told.stderr}\n{logs}")
