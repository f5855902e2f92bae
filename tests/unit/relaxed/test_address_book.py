"""The places of a mesh's processes, and who is named if one does not come."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_autosync.errors import ExchangeError
from lightning_autosync.relaxed.transport.handshake import exchange_addresses


def test_who_does_not_sign_in_is_named() -> None:
    with pytest.raises(ExchangeError, match=r"^ranks 1, 2 did not come to the mesh in 0\.3 s$"):
        exchange_addresses(dist.HashStore(), b"secret", 0, 3, ("127.0.0.1", 1), rejoin=False, timeout=0.3)
