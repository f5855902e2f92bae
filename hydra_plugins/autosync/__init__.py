"""Plug-ins for Hydra: a sweeper that is an Optuna study, and a launcher by torchrun.

Hydra imports every module here whose name has no leading underscore whenever any Hydra application starts, so these
import nothing heavy; what they need is imported when they are used.
"""
