"""Callbacks that slow ranks down on purpose, to measure the cost of heterogeneity on equal machines.

`lightning.SlowRanks` is the callback for lightning.pytorch, `pytorch.SlowRanks` for pytorch_lightning. In
``autosync train``::

    trainer:
      callbacks:
        - _target_: lightning_autosync.strategy.slowing.lightning.SlowRanks
          slowdowns: [{ranks: [3], factor: 4.0}]
"""
