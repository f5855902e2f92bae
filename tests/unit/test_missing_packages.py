"""Without the packages of an extra, what needs them says so in one line that names the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_autosync.errors import EXTRAS, MissingPackageError, needed_for

TESTS = Path(__file__).parents[1]

FEATURES = {
    "Replay": ("The simulation of plans", "numba"),
    "page": ("The HTML page of a job", "markupsafe"),
    "learned": ("The simulation of plans", "numba"),
    "dataset": ("A dataset of measured plans", "pyarrow"),
    "digits": ("The data of digits", "sklearn"),
    "slurm": ("launch=slurm", "submitit"),
    "command": ("autosync tune: This command", "hydra"),
}
"""For each call in `CALLS`: the feature that the error names, and the package that it lacks."""

CALLS = """
import sys
import missing
missing.hide()

def Replay():
    from lightning_autosync.replay import Replay

def page():
    from lightning_autosync.strategy.tuning.report import TuningReport
    object.__new__(TuningReport).save("page.html")

def learned():
    import lightning_autosync.learned

def dataset():
    import importlib.util, lightning_autosync.errors
    from pathlib import Path
    path = Path(lightning_autosync.errors.__file__).parent / "learned/dataset/arrow.py"
    spec = importlib.util.spec_from_file_location("arrow", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

def digits():
    from lightning_autosync.measure.models.digits import load_digits
    load_digits()

def slurm():
    from lightning_autosync.measure.launches.slurm import submit
    submit(print, {}, None, 1, 1, {})

def command():
    from lightning_autosync.cli import main
    sys.argv = ["autosync", "tune"]
    main()

for call in (Replay, page, learned, dataset, digits, slurm, command):
    try:
        call()
    except (ImportError, SystemExit) as error:
        print(f"{call.__name__}|{error}")
"""


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, check=False, cwd=TESTS, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("|") for line in done.stdout.splitlines())


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_names_the_package_and_the_extra(feature: str, told: dict[str, str]) -> None:
    subject, package = FEATURES[feature]
    install = f'pip install ".[{EXTRAS[package]}]" in a checkout of lightning-autosync'
    assert told[feature] == f"{subject} needs {package}, which is not installed: {install}"


def test_other_missing_modules_are_told_as_they_are() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'nothing_known'") as raised, needed_for("X"):
        import nothing_known  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(raised.value, MissingPackageError)
