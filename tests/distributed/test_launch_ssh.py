"""Workers on nodes that a command such as ssh reaches: a stand-in for it, and a real sshd where there is one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import worker_calls
from near import cluster, near_command
from test_workers import wait_until_gone

from lightning_autosync.errors import ClusterError, DocumentError
from lightning_autosync.measure.launches.launch import SshLaunch
from lightning_autosync.measure.launches.settings import LaunchSettings
from lightning_autosync.measure.workers import LaunchError, WorkerError, WorkerPool

HERE = Path(__file__).parent


@pytest.fixture
def near(tmp_path: Path) -> str:
    return near_command(tmp_path)


@pytest.fixture(scope="module")
def secure_shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The ssh command that reaches a real server on this machine, which runs as long as the tests need it."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if not (os.path.exists(server) and shutil.which("ssh") and shutil.which("ssh-keygen")):
        pytest.skip("needs OpenSSH's server and client")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "StrictModes": "no",
        "AuthorizedKeysFile": folder / "user.pub", "PidFile": "none", "UsePAM": "no", "PermitRootLogin": "yes",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    process = subprocess.Popen([server, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.PIPE)
    options = ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
    command = ["ssh", "-i", str(folder / "user"), "-p", str(port), *(word for one in options for word in ("-o", one))]
    try:
        for _ in range(50):
            if subprocess.run([*command, "127.0.0.1", "true"], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        else:
            process.terminate()
            pytest.skip(f"sshd does not serve here: {process.communicate()[1].decode()[-300:]}")
        yield command
    finally:
        process.terminate()
        process.wait()


def check_pool(command: list[str]) -> None:
    """Ranks meet, print without harm, tell of errors, and are gone when the pool is closed."""
    launch = SshLaunch(cluster("127.0.0.1", "127.0.0.1"), command, interface="lo")
    with WorkerPool(2, launch, timeout=60.0, extra_paths=[HERE]) as pool:
        assert pool.run(worker_calls.sum_of_ranks) == [1.0, 1.0]
        with pytest.raises(WorkerError, match="rank 1 raised ValueError: no luck on 1"):
            pool.run(worker_calls.fail_on, rank=1)
        pids = pool.run(os.getpid)
        assert pool.run(os.getcwd) == [os.getcwd()] * 2
        assert not set(pids) & set(pool.pids) or command[0] != "ssh"
    assert wait_until_gone(pids) == []


@pytest.mark.slow
def test_a_command_that_stands_for_ssh(near: str) -> None:
    check_pool([near])


def test_a_real_server(secure_shell: list[str]) -> None:
    check_pool(secure_shell)


@pytest.mark.slow
def test_workers_end_with_a_caller_that_is_interrupted(secure_shell: list[str]) -> None:
    launch = SshLaunch(cluster("127.0.0.1", "127.0.0.1"), secure_shell, interface="lo")
    pids: list[int] = []

    def interrupted() -> None:
        with WorkerPool(2, launch, timeout=60.0) as pool:
            pids.extend(pool.run(os.getpid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 2
    assert wait_until_gone(pids) == []


def test_a_node_that_cannot_be_reached_is_told(near: str) -> None:
    launch = SshLaunch(cluster("127.0.0.1", "10.255.255.1"), [near], interface="lo")
    with pytest.raises(WorkerError, match=r"rank 1 died \(exit status 255\)[^$]*no route to 10\.255\.255\.1"):
        WorkerPool(2, launch, timeout=60.0)


def test_missing_addresses_are_told(near: str) -> None:
    with pytest.raises(ClusterError, match=r"cluster 'near': nodes\[1\]: address: missing; launch=ssh"):
        SshLaunch(cluster("127.0.0.1", None), [near])
    with (
        pytest.raises(DocumentError, match="cluster: missing; launch=ssh needs one"),
        LaunchSettings(kind="ssh").open(None),
    ):
        pass


def test_a_missing_command_is_told() -> None:
    with pytest.raises(LaunchError, match=r"'no-such-shell' is not installed; install it \(package openssh-client\)"):
        SshLaunch(cluster("127.0.0.1"), ["no-such-shell"])


def test_another_interpreter_and_directory(near: str, tmp_path: Path) -> None:
    directory = tmp_path / "my job"
    directory.mkdir()
    shown = tmp_path / "shown"
    shown.write_text('#!/bin/sh\necho "$PWD" "$RANK" "${PYTHONPATH-none}" "$@"')
    shown.chmod(0o755)
    launch = SshLaunch(cluster("127.0.0.1"), [near], python=str(shown), directory=str(directory))
    started, environment = launch.command(
        0, ["/usr/bin/python", "-m", "worker"], {"RANK": "it's 0", "PYTHONPATH": "/here"}
    )
    said = subprocess.run(started, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == f"{directory} it's 0 none -m worker"


def test_a_directory_that_is_not_there_is_told(near: str) -> None:
    launch = SshLaunch(cluster("127.0.0.1"), [near], directory="/no such")
    message = (
        r"launch=ssh: 127\.0\.0\.1: there is no directory /no such; set one that exists there: launch\.directory=DIR"
    )
    with pytest.raises(WorkerError, match=message):
        WorkerPool(1, launch, timeout=60.0)
