"""pyarrow, or a clear error without it. Functions that read or write datasets import it here, because it takes long."""

from __future__ import annotations

from lightning_autosync.errors import needed_for

with needed_for("A dataset of measured plans"):
    import pyarrow
    import pyarrow.compute
    from pyarrow import parquet

__all__ = ["parquet", "pyarrow"]
