"""Models described by their layers, with the names and shapes of their public implementations.

Each function follows one batch through the model and returns the ``Flow``; its keyword arguments,
all with defaults, are what the catalogue lets a user choose.
"""
