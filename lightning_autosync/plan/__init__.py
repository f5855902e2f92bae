"""How gradients are synchronized: plans, their builders, and the schedules that they compile to."""

from __future__ import annotations

from lightning_autosync.plan import builders, codecs, topologies
from lightning_autosync.plan.compiler import compile_plan
from lightning_autosync.plan.pairwise import PairwiseReduce
from lightning_autosync.plan.schedule import (
    AllReduce,
    AllToAll,
    Message,
    Round,
    RowBroadcast,
    Schedule,
    SharedMemoryReduce,
    Transfer,
    TreeTransfer,
    TwoLevelAllReduce,
)
from lightning_autosync.plan.spec import (
    SEMANTICS,
    Compressor,
    Consistency,
    Group,
    Partition,
    Semantics,
    SyncPlan,
    TopologyName,
    WeightedTree,
    signature,
)
from lightning_autosync.plan.trees import Tree

__all__ = [
    "SEMANTICS",
    "AllReduce",
    "AllToAll",
    "Compressor",
    "Consistency",
    "Group",
    "Message",
    "PairwiseReduce",
    "Partition",
    "Round",
    "RowBroadcast",
    "Schedule",
    "Semantics",
    "SharedMemoryReduce",
    "SyncPlan",
    "TopologyName",
    "Transfer",
    "Tree",
    "TreeTransfer",
    "TwoLevelAllReduce",
    "WeightedTree",
    "builders",
    "codecs",
    "compile_plan",
    "signature",
    "topologies",
]
