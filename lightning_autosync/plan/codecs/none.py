"""Messages that travel as they are."""

from __future__ import annotations

from lightning_autosync.plan.codecs import CodecFormat, register


class NoCodec(CodecFormat):
    """Elements travel in the gradients' own type."""

    name = encoded_as = "none"
    sums = "plain"
    place = 0


register(NoCodec())
