"""Results of commands: what is written is what is read, and is JSON; each has figures for a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from document_kinds import results

from lightning_autosync.documents import RESULT, Result, result_figures


@pytest.mark.parametrize("result", results().values(), ids=results())
def test_a_result_is_read_as_it_was_written(tmp_path: Path, result: Result) -> None:
    result.write(tmp_path)
    written = json.loads((tmp_path / RESULT).read_text())
    assert json.dumps(written, allow_nan=False) == json.dumps(result.to_dict())
    assert type(result).read(tmp_path).to_dict() == written
    figures = result_figures(tmp_path)
    assert figures == result.figures()
    assert figures
    assert all(isinstance(text, str) and len(text) < 60 for text in figures.values())


def test_only_results_of_our_commands_have_figures(tmp_path: Path) -> None:
    assert result_figures(tmp_path) == {}
    for other in ('{"format": "theirs/1"}', "[1, 2]", '"text"'):
        (tmp_path / RESULT).write_text(other)
        assert result_figures(tmp_path) == {}
