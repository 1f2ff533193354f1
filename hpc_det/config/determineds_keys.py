"""Keys of Determined's experiment files that hpc_det does not have, and what to do instead (its schemas/expconf/v0)."""

from __future__ import annotations

_CONTAINER = "leave it out: ranks run without a container, in the Python that hpc-det runs in"
_STORAGE = "leave it out: checkpoints lie in the experiment's folder below $HPC_DET_ROOT"
_HOROVOD = "leave it out: it was for horovod"
_QUEUE = "leave it out, or say it to the scheduler: slurm.sbatch_args"

REMEDIES = {
    "records_per_epoch": "leave it out: an epoch is what the training loader holds",
    "bind_mounts": "leave it out: ranks see the file systems of their node",
    "environment.image": _CONTAINER,
    "environment.force_pull_image": _CONTAINER,
    "environment.registry_auth": _CONTAINER,
    "environment.ports": _CONTAINER,
    "environment.proxy_ports": _CONTAINER,
    "environment.add_capabilities": _CONTAINER,
    "environment.drop_capabilities": _CONTAINER,
    "environment.pod_spec": _CONTAINER,
    "resources.shm_size": _CONTAINER,
    "resources.devices": _CONTAINER,
    "resources.priority": _QUEUE,
    "resources.weight": _QUEUE,
    "resources.max_slots": "leave it out: an experiment is one trial so far",
    "resources.native_parallel": _HOROVOD,
    "resources.agent_label": "name a partition: resources.resource_pool",
    "checkpoint_storage.type": _STORAGE,
    "checkpoint_storage.host_path": _STORAGE,
    "checkpoint_storage.storage_path": _STORAGE,
    "checkpoint_storage.container_path": _STORAGE,
    "checkpoint_storage.bucket": _STORAGE,
    "optimizations.mixed_precision": "call context.experimental.use_amp() in the trial",
    "optimizations.tensor_fusion_threshold": _HOROVOD,
    "optimizations.tensor_fusion_cycle_time": _HOROVOD,
    "optimizations.auto_tune_tensor_fusion": _HOROVOD,
    "profiling": "call context.set_profiler(...) in the trial",
    "workspace": "use labels",
    "project": "use labels",
}
