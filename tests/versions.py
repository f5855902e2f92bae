"""Runs a short selection of tests on each supported Python: ``python tests/versions.py [VERSION ...]``.

Each version has a virtual environment of its own in ``.versions``, which is kept. ``3.10-lowest`` has the lowest
versions that pyproject.toml allows of all packages, and ``3.11-minimal`` has no extra and runs one job; the others have
the newest versions of all packages. A Python that is not installed is left out, which is a failure if it was named. The
environment variable ``TORCH_INDEX`` may name an index of CPU builds of torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10-lowest", "3.10", "3.11", "3.11-minimal", "3.12", "3.13")
CONSTRAINTS = {"3.10-lowest": "constraints-lowest.txt", "3.11-minimal": "constraints.txt"}
TOOLS = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100", "jsonschema>=4.21"]
JOB = "tests/strategy/minimal_job.py"
TESTS = [
    "tests/unit/cluster/test_cluster_spec.py",
    "tests/unit/documents/test_documents.py",
    "tests/unit/engine/test_codecs.py",
    "tests/unit/plan/test_plans.py",
    "tests/unit/plan/test_topologies.py",
    "tests/unit/replay/test_replay_by_hand.py",
    "tests/unit/search/test_selection.py",
    "tests/unit/strategy",
    "tests/unit/test_missing_packages.py",
    "tests/unit/test_packaging.py",
    "tests/unit/workload/test_capture.py",
    "tests/strategy/test_choice.py",
    "tests/strategy/test_launch.py",
    "tests/strategy/test_minimal_install.py",
    "tests/strategy/test_registration.py",
]


def interpreter(python: str) -> str | None:
    """The program ``python3.X``, on the path or as pyenv installs it; None if there is none."""
    found = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{python}")


def prepare(version: str, program: str) -> Path:
    """Make the environment of a version if it is not there; returns its interpreter."""
    folder = ROOT / ".versions" / version
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    subprocess.run([program, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "install", "-q"]
    if version in CONSTRAINTS:
        pip += ["-c", str(ROOT / CONSTRAINTS[version])]
    index = os.environ.get("TORCH_INDEX")
    # torch comes first and alone, so that the CPU build is there before anything else asks for it.
    subprocess.run([*pip, "torch", *(["--extra-index-url", index] if index else [])], check=True)
    package = ["-e", str(ROOT)] if version.endswith("-minimal") else ["-e", f"{ROOT}[all]", *TOOLS]
    subprocess.run([*pip, *package], check=True)
    ready.touch()
    return python


def run(version: str) -> str:
    """Run the tests on a version; returns how they ended."""
    program = interpreter(version.partition("-")[0])
    if program is None:
        return "not run: no such interpreter"
    try:
        python = prepare(version, program)
    except subprocess.CalledProcessError as error:
        return f"FAILED to install ({error})"
    start = time.monotonic()
    command = [JOB, os.devnull] if version.endswith("-minimal") else ["-m", "pytest", "-q", "-m", "not slow", *TESTS]
    done = subprocess.run([python, *command], cwd=ROOT, check=False)
    return f"{'passed' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s"


def main() -> int:
    """Run all versions, or those that the command line names; returns 1 if tests failed or a named one did not run."""
    named = sys.argv[1:]
    if unknown := set(named) - set(VERSIONS):
        sys.exit(f"{min(unknown)}: unknown version; allowed: {', '.join(VERSIONS)}")
    results = {version: run(version) for version in named or VERSIONS}
    for version, result in results.items():
        print(f"{version:12} {result}")
    bad = ("FAILED", "not run") if named else ("FAILED",)
    return int(any(result.startswith(bad) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
