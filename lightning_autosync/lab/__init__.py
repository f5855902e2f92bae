"""Comparisons that reproduce papers and tables. No other part of the package but the CLI imports this one."""
