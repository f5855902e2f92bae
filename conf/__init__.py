"""The configurations of ``autosync``.

This file makes the folder a package, as Hydra requires of ``hydra.searchpath: [pkg://lightning_autosync.conf]``.
"""
