"""``autosync train``: any LightningModule, under any way to synchronize, wherever its ranks run."""
