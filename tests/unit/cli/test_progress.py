"""The progress of long verbs: one line of at most the terminal's width; elsewhere a line now and then."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
from rich.console import Console

from lightning_autosync.cli.progress import PACE, ShownProgress

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = "measured 123.4 ms, " + "a very long name of a combination of model and cluster, " * 3


def drawn(console: Console) -> list[str]:
    """What was drawn, line by line, without control sequences."""
    assert isinstance(console.file, StringIO)
    return re.split(r"[\r\n]+", CONTROL.sub("", console.file.getvalue()))


def terminal(width: int = 80) -> Console:
    return Console(file=StringIO(), width=width, force_terminal=True, legacy_windows=False)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("verb", ["bench", "collect", "converge", "fit", "rehearse", "tune", "validate"])
def test_the_bar_is_one_line_that_fits(verb: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = terminal(width)
    with ShownProgress(verb, console) as report:
        report(1234, 10_080, LONG)
        report._bar.refresh()
    lines = [line for line in drawn(console) if line.strip()]
    assert max(map(len, lines)) <= width
    assert any(line.lstrip().startswith(verb) and "1234/10080" in line and "measured" in line for line in lines)


@contextmanager
def logging_to(stream: StringIO) -> Iterator[logging.StreamHandler[StringIO]]:
    handler = logging.StreamHandler(stream)
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_lines_of_the_log_go_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console, stream = terminal(), StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    with logging_to(stream) as handler:
        with ShownProgress("bench", console) as report:
            report(1, 9, "first")
            logging.getLogger("any").warning("a worker failed")
        assert handler.stream is stream
    assert stream.getvalue() == ""  # else the terminal would have the line in the middle of the bar
    assert any(line.strip() == "a worker failed" for line in drawn(console))


@pytest.mark.parametrize("terminal_name", [None, "dumb"])
def test_elsewhere_there_is_a_line_of_the_log_now_and_then(
    terminal_name: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if terminal_name is not None:
        monkeypatch.setenv("TERM", terminal_name)
    console = Console(file=StringIO(), width=80, force_terminal=terminal_name is not None)
    now = 0.0
    with caplog.at_level(logging.INFO), ShownProgress("validate", console, clock=lambda: now) as report:
        for done in range(1, 101):
            now += PACE / 4
            report(done, 100, f"case {done}")
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "validate: 1 of 100: case 1"
    assert said[-1] == "validate: 100 of 100: case 100"
    assert len(said) == 26  # the first, then every fourth
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == ""
