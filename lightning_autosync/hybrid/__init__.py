"""Hybrid parallelism: splits operators over a mesh of ranks (AutoDDL; Chen et al., 2023)."""

from __future__ import annotations

from lightning_autosync.hybrid.plan import HybridPlan, LayerPlan, Layout, Signature

__all__ = ["HybridPlan", "LayerPlan", "Layout", "Signature"]
