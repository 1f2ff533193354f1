"""`determined.core`: Determined's Core API with the objects of hpc_det.core (docs/how-to/port-from-determined.md)."""

from hpc_det.compat.det_core.checkpoint import CheckpointContext, DownloadMode
from hpc_det.compat.det_core.context import Context, init
from hpc_det.compat.det_core.distributed import DistributedContext, DummyDistributedContext
from hpc_det.compat.det_core.preempt import PreemptContext, PreemptMode
from hpc_det.compat.det_core.profiler import ExperimentalCoreContext, ProfilerContext
from hpc_det.compat.det_core.searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
from hpc_det.compat.det_core.train import EarlyExitReason, TensorboardMode, TrainContext

__all__ = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "DummyDistributedContext",
    "EarlyExitReason",
    "ExperimentalCoreContext",
    "PreemptContext",
    "PreemptMode",
    "ProfilerContext",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TensorboardMode",
    "TrainContext",
    "Unit",
    "init",
]
