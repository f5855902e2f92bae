"""Batch shares: ranks compute different numbers of samples of each global batch, with DDP's result.

Rank i computes b_i of the B samples of a global batch, and multiplies its gradient by n b_i / B. The mean over n ranks
is then the mean over samples. `BatchShares` holds the shares of one job. `sampler` cuts batches,
`balance` computes shares from measured times, and `auto` changes them while a job trains. `micro_batches` computes a
rank's samples in parts of one size.
"""
