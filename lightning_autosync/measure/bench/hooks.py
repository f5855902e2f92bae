"""DDP's communication hooks, as they work on gloo.

Annotations are not postponed here: DDP compares those of a hook with the types themselves.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_autosync.cluster import ClusterSpec
from lightning_autosync.measure.bench.settings import DDPOptions

FIRST_STEP = 2
"""The first step with a hook that keeps state by bucket: DDP cuts its buckets anew after the first."""


def install(wrapped: DistributedDataParallel, options: DDPOptions, cluster: ClusterSpec) -> Callable[[], None] | None:
    """Give DDP the hook of ``options``.

    Returns:
        What is to be called after every step of the optimizer; None where nothing is.
    """
    if options.hook == "fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif options.hook == "bf16":
        wrapped.register_comm_hook(None, bf16_hook)
    elif options.hook == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=options.rank, start_powerSGD_iter=FIRST_STEP)
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif options.hook == "post_local_sgd":
        wrapped.register_comm_hook(PostLocalSGDState(None, _node_group(cluster), FIRST_STEP), post_localSGD_hook)
        averager = PeriodicModelAverager(period=options.period)
        return lambda: averager.average_parameters(wrapped.parameters())
    return None


def bf16_hook(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The all-reduce in bfloat16. torch's own ``bf16_compress_hook`` raises a TypeError on gloo."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size(group))
    reduced = dist.all_reduce(narrow, group=group, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _node_group(cluster: ClusterSpec) -> dist.ProcessGroup:
    """This rank's group of those that share its node; alone where all ranks share one."""
    nodes = [list(cluster.ranks_of(index)) for index in range(len(cluster.nodes))]
    groups = nodes if len(nodes) > 1 else [[rank] for rank in range(cluster.world_size)]
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group
