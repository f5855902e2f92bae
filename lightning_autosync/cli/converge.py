"""``autosync converge``: train with several methods, print the tables, write result and figure.

With ``isolation`` it only simulates how groups form: nothing trains, and there is no figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_autosync.cli.progress import ShownProgress
from lightning_autosync.cli.tables import table_console
from lightning_autosync.documents import RESULT
from lightning_autosync.lab.convergence.comparison import compare
from lightning_autosync.lab.convergence.isolation import simulate_groups, survey_remarks, survey_table
from lightning_autosync.lab.convergence.output import draw, remarks, result_table
from lightning_autosync.lab.convergence.settings import ConvergenceSettings


def converge(configuration: dict[str, Any], directory: Path) -> None:
    """Run one comparison, and write ``result.json`` and ``result.png`` to ``directory``.

    Raises:
        AutoSyncError: a setting is wrong, or a worker failed.
    """
    settings = ConvergenceSettings.parse(configuration)
    console = table_console()
    if settings.isolation is not None:
        survey = simulate_groups(settings)
        console.print(survey_table(survey))
        for line in survey_remarks(survey):
            console.print(line, soft_wrap=True, highlight=False)
        survey.write(directory)
        console.print(f"{directory / RESULT}", soft_wrap=True, highlight=False)
        return
    with ShownProgress("converge") as report:
        result = compare(settings, report)
    for speed in result.settings.chosen_speeds:
        console.print(result_table(result, speed))
    for line in remarks(result):
        console.print(line, soft_wrap=True, highlight=False)
    result.document().write(directory)
    draw(result, directory / "result.png")
    console.print(f"{directory / RESULT}, {directory / 'result.png'}", soft_wrap=True, highlight=False)
