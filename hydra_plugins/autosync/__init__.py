"""Plug-ins for Hydra: a sweeper that is an Optuna study, a launcher by torchrun, and this package's config groups.

Hydra imports every module here whose name has no leading underscore whenever any Hydra application starts, so these
import nothing heavy; what they need is imported when they are used.
"""
