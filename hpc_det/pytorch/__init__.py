"""Once per rank: PyTorchTrial, its context, data and the training loop."""

from hpc_det.core.metrics import Reducer
from hpc_det.pytorch import samplers
from hpc_det.pytorch.callback import PyTorchCallback
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.data import DataLoader, TorchData
from hpc_det.pytorch.experimental import PyTorchExperimentalContext
from hpc_det.pytorch.load import CheckpointLoadContext, load_trial_from_checkpoint_path
from hpc_det.pytorch.lr_scheduler import LRScheduler
from hpc_det.pytorch.reducer import MetricReducer
from hpc_det.pytorch.trainer import Trainer, init
from hpc_det.pytorch.trial import PyTorchTrial
from hpc_det.pytorch.units import Batch, Epoch, TrainUnit

__all__ = [
    "Batch",
    "CheckpointLoadContext",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchExperimentalContext",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "init",
    "load_trial_from_checkpoint_path",
    "samplers",
]
