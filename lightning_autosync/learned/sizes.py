"""Sizes of the networks, by kind.

Those of AutoSync's are smaller than the paper's, which are in brackets: one core must price hundreds of plans a second.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lightning_autosync.documents import Count, Record

Width = Annotated[Count, Field(le=256)]
Layers = Annotated[Count, Field(le=8)]


class LinearSizes(Record):
    """There are none: it has a weight for each feature."""


class RecurrentSizes(Record):
    """Of `RecurrentNetwork`.

    Attributes:
        hidden: width of a variable's vector [32].
        state: width of the LSTM's state, either way [128].
        layers: of the LSTM [3].
    """

    hidden: Width = 32
    state: Width = 48
    layers: Layers = 2


class AttentionSizes(Record):
    """Of `AttentionNetwork`.

    Attributes:
        hidden: width of a variable's vector, and of what each head makes of it.
        heads: of attention.
        layers: of attention.
    """

    hidden: Width = 32
    heads: Layers = 4
    layers: Layers = 2


class HeteroSizes(Record):
    """Of `HeteroNetwork`.

    Attributes:
        hidden: width of a node's state.
        layers: of convolution.
        dropout: share of the read-out that is left out in training, below 1.
    """

    hidden: Width = 32
    layers: Layers = 2
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
