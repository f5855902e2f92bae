"""Messages without compression."""

from __future__ import annotations

from lightning_autosync.plan.codecs import CodecFormat, register


class NoCodec(CodecFormat):
    """Elements keep the gradients' own type on the wire."""

    name = encoded_as = "none"
    sums = "plain"
    settings = ()
    place = 0


register(NoCodec())
