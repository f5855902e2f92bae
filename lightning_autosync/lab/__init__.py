"""Comparisons that reproduce papers and tables. Nothing in the product imports this package."""
