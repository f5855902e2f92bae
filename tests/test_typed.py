"""Users who check their code with mypy see the types of the public names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # without a cache, mypy takes two minutes of a core for torch and Lightning
def test_a_users_script_passes_mypy_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api")
    script = shutil.copy(Path(__file__).parent / "typed" / "user_script.py", tmp_path)
    monkeypatch.chdir(tmp_path)  # and not in the repository, whose pyproject.toml has settings for mypy
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'user'}"
    output, errors, status = api.run(["--strict", "--follow-imports=silent", cache, str(script)])
    assert (status, errors) == (0, ""), output
