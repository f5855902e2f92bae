"""Takes the screenshots of the documentation into ``docs/images``: ``python docs/screenshots.py RUN PAGE SITE``.

``RUN`` is the directory of an ``autosync tune`` with its ``report.html``, ``PAGE`` the page of a training, saved by
``strategy.report().save("sync.html")``, and ``SITE`` the folder that ``make docs`` fills. Needs Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
IMAGES = HERE / "images"
MOST_BYTES = 150_000
COLUMNS = 80
PREDICTION = ["predict", "workload=bert_base", "cluster=two_racks_8to1"]
CHROMIUM = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts that the picture of a terminal would load from the network."""


def main() -> None:
    """Take all screenshots."""
    run, page, site = map(Path, sys.argv[1:])
    shoot(run / "report.html", "tuning-report", 1100, 1240)
    shoot(page, "training-page", 1100, 1240)
    shoot(site / "index.html", "site", 1280, 900)
    with tempfile.TemporaryDirectory() as folder:
        shoot_terminal(Path(folder), PREDICTION, "terminal-predict")


def shoot(page: Path, name: str, width: int, height: int) -> None:
    """Save the upper part of a page as a PNG of ``width`` x ``height`` pixels.

    Raises:
        ValueError: the file is too large for the repository.
    """
    path = IMAGES / f"{name}.png"
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={path}"]
        command = [shutil.which("chromium") or "chromium", *CHROMIUM, *options, page.absolute().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    check_size(path)


def shoot_terminal(folder: Path, words: list[str], name: str) -> None:
    """Save what a verb prints on a terminal of 80 columns as an SVG."""
    command = [sys.executable, "-m", "lightning_autosync.cli", *words, f"hydra.run.dir={folder}/{words[0]}"]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(f"$ autosync {' '.join(words)}", highlight=False)
    console.print(Text.from_ansi(printed.replace(str(folder), "outputs")))
    path = IMAGES / f"{name}.svg"
    path.write_text(FONT.sub("", console.export_svg(title="autosync", unique_id=name)))
    check_size(path)


def check_size(path: Path) -> None:
    """Print the size of a picture; refuse one that is too large for the repository."""
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    if size > MOST_BYTES:
        raise ValueError(f"{path}: {size} bytes; at most {MOST_BYTES} are allowed")


if __name__ == "__main__":
    main()
