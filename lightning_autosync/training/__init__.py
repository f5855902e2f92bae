"""``autosync train``: trains any LightningModule with DDP or AutoSync, on any launcher."""
