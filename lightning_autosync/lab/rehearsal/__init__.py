"""Rehearsals: samplers compared with a replay in place of the wire, whose constants and links they do not know."""
