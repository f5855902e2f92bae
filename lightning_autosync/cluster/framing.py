"""What TCP/IP adds to the bytes that it carries."""

from __future__ import annotations

PAYLOAD_SHARE = 1448 / 1514
"""Of a full Ethernet frame with TCP/IPv4 and its timestamps. Rates of links count whole frames."""
FRAMING = 1514 / 1448
"""Bytes on a link for each byte of payload, in full frames."""
