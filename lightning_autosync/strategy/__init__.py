"""`AutoSyncStrategy` for lightning.pytorch, pytorch_lightning and Fabric.

Each framework has its own base class and registry, so each has its module here (``lightning``, ``pytorch``,
``fabric``); what they share lies beside them, `Replica` first. Nothing is imported here, for `registration`
must be cheap.
"""
