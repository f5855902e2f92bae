"""Ranks made slow on purpose, in any Trainer: what heterogeneity costs can be tried on equal machines.

`lightning.SlowRanks` is the callback for lightning.pytorch, `pytorch.SlowRanks` that for pytorch_lightning. In
``autosync train``::

    trainer:
      callbacks:
        - _target_: lightning_autosync.strategy.slowing.lightning.SlowRanks
          slowdowns: [{ranks: [3], factor: 4.0}]
"""
