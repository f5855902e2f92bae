"""Limits of documents: what is beyond them is refused, because its reader would need much memory or time."""

from __future__ import annotations

MOST_BYTES = 16 * 2**20
"""Largest size of a document's file, or of a line in a file with one document per line."""
MOST_YAML_BYTES = 4 * 2**20
"""Largest size of a YAML file, because its reader takes a second per megabyte."""
MOST_VALUES = 500_000
"""Largest number of values in a document, with YAML aliases expanded."""
MOST_NODES = 100_000
"""Largest number of nodes in a YAML text, because its reader takes a kilobyte per node. JSON has no such limit."""
MOST_LEVELS = 64
"""Largest depth of nested lists and mappings."""
LARGEST_NUMBER = 1e60
"""Largest absolute value of a number without a field's own limit; products of a few such numbers are still finite."""
MOST_DIGITS = 400
"""Largest number of digits of a number in YAML, because its reader takes quadratic time."""
