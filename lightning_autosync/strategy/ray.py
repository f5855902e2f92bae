"""`RayAutoSyncStrategy`: for Trainers in the workers of Ray Train. Needs the extra ``ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_autosync.engine.collectives import gather_json
from lightning_autosync.errors import needed_for
from lightning_autosync.strategy.lightning import AutoSyncStrategy

with needed_for("RayAutoSyncStrategy"):
    import ray
    import ray.train

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as RayDDPStrategy
else:
    from ray.train.lightning import RayDDPStrategy


class RayAutoSyncStrategy(AutoSyncStrategy, RayDDPStrategy):
    """`AutoSyncStrategy` for the workers of Ray Train, accepted by ``ray.train.lightning.prepare_trainer``::

        trainer = Trainer(strategy=RayAutoSyncStrategy(), plugins=[RayLightningEnvironment()], devices="auto")
        prepare_trainer(trainer).fit(model)

    Arguments and errors are those of `AutoSyncStrategy`. Ray starts the workers, gives each its device and forms their
    process group: ``process_group_backend`` and ``start_method`` have no effect. Set the backend in
    ``ray.train.torch.TorchConfig``. If a worker is lost, Ray ends all workers, and starts them again if its
    ``FailureConfig`` says so; a single rank cannot return to the job.
    """

    strategy_name = "autosync_ray"

    def _job_shape(self) -> tuple[int, int]:
        """Where Ray placed the workers. The Trainer's ``num_nodes`` and ``devices`` describe a single worker."""
        nodes = gather_json(ray.train.get_context().get_node_rank())
        sizes = {nodes.count(node) for node in nodes}
        if len(sizes) == 1 and nodes == sorted(nodes):
            devices = sizes.pop()
            return len(nodes) // devices, devices
        return len(nodes), 1  # uneven nodes: each rank counts as a node until links are measured
