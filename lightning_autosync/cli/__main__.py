"""``python -m lightning_autosync.cli VERB ...``."""

from lightning_autosync.cli import main

if __name__ == "__main__":
    main()
