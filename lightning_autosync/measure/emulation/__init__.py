"""Emulates the links of a cluster on one Linux machine."""
