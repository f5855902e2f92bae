"""Results of commands: what is written is what is read, and is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from document_kinds import results

from lightning_autosync.documents import RESULT, Result


@pytest.mark.parametrize("result", results().values(), ids=results())
def test_a_result_is_read_as_it_was_written(tmp_path: Path, result: Result) -> None:
    result.write(tmp_path)
    written = json.loads((tmp_path / RESULT).read_text())
    assert json.dumps(written, allow_nan=False) == json.dumps(result.to_dict())
    assert type(result).read(tmp_path).to_dict() == written
