"""The space of plans: parameter domains, random points, and moves between points."""

from __future__ import annotations

from lightning_autosync.plan.space.domains import Block, Domain, Value, make_blocks
from lightning_autosync.plan.space.refinement import Refinement
from lightning_autosync.plan.space.space import BUILDER, COMPOSED, Genome, PlanSpace

__all__ = ["BUILDER", "COMPOSED", "Block", "Domain", "Genome", "PlanSpace", "Refinement", "Value", "make_blocks"]
