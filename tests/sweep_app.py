"""A small Hydra application to sweep over: ``python sweep_app.py -m x=1,2``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(config: DictConfig) -> float:
    print("job", config.x, config.get("sampler", "-"), os.environ.get("RANK", "-"), flush=True)
    if config.get("die_at") == config.x and not Path(config.died).exists():
        Path(config.died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("wait_at") == config.x and not Path(config.waited).exists():
        Path(f"{config.waited}.aside").write_text(f"{os.getpid()} {os.getppid()}")
        os.replace(f"{config.waited}.aside", config.waited)
        signal.pause()
    if config.get("fail_at") == config.x and os.environ.get("RANK", "1") == "1":
        raise ValueError(f"no luck with {config.x}")
    return (float(config.x) - 3) ** 2


if __name__ == "__main__":
    sys.exit(main())
