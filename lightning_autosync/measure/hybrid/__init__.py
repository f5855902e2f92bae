"""Measures the costs of split operators on live workers."""
