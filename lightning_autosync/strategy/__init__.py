"""`AutoSyncStrategy` for lightning.pytorch, pytorch_lightning and Fabric.

Each framework has its own base class and registry, and therefore its own module here (``lightning``, ``pytorch``,
``fabric``). The other modules are common code; begin with `base.Replica`. This file imports nothing, so that
`registration` is cheap.
"""
