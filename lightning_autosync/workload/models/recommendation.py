"""Recommenders: nearly all of their bytes are embeddings of which a step touches few rows."""

from __future__ import annotations

from lightning_autosync.workload.flow import Flow, distinct


def ncf(
    *,
    batch_size: int = 1024,
    users: int = 138_493,
    items: int = 26_744,
    factors: int = 64,
    hidden: tuple[int, ...] = (256, 256, 128, 64),
) -> Flow:
    """Neural collaborative filtering (NeuMF of He et al., WWW 2017), named as in MLPerf's reference.

    Users and items default to those of MovieLens-20M. Embeddings come in pairs: ``factors`` wide for
    the factorization, half of ``hidden[0]`` wide for the perceptron.
    """
    pairs = Flow(batch_size, factors)
    for prefix, width in (("mf", factors), ("mlp", hidden[0] // 2)):
        pairs.channels = width
        pairs.embedding(f"{prefix}_user_embed", users, distinct(batch_size, users))
        pairs.embedding(f"{prefix}_item_embed", items, distinct(batch_size, items))
    pairs.channels = 2 * (hidden[0] // 2)
    for index, width in enumerate(hidden[1:]):
        pairs.linear(f"mlp.{index}", width)
    pairs.channels += factors
    return pairs.linear("final", 1)
