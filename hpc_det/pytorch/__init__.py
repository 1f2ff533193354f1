"""The API for PyTorch: PyTorchTrial, its context, data, the Trainer, checkpoint loading, batch inference."""

from hpc_det.core.progress import Batch, Epoch, TrainUnit
from hpc_det.distributed.metrics import Reducer
from hpc_det.pytorch import samplers
from hpc_det.pytorch.data import DataLoader, TorchData
from hpc_det.pytorch.inference import Outputs, TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process
from hpc_det.pytorch.loop.trainer import Trainer, init
from hpc_det.pytorch.samplers import adapt_batch_sampler
from hpc_det.pytorch.state.load import CheckpointLoadContext, load_trial_from_checkpoint_path
from hpc_det.pytorch.strategies.device import data_length, to_device
from hpc_det.pytorch.trial.callback import PyTorchCallback
from hpc_det.pytorch.trial.pytorch_context import LRScheduler, PyTorchExperimentalContext, PyTorchTrialContext
from hpc_det.pytorch.trial.reducer import MetricReducer
from hpc_det.pytorch.trial.trial import PyTorchTrial

__all__ = [
    "Batch",
    "CheckpointLoadContext",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "Outputs",
    "PyTorchCallback",
    "PyTorchExperimentalContext",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "TorchBatchProcessor",
    "TorchBatchProcessorContext",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "adapt_batch_sampler",
    "data_length",
    "init",
    "load_trial_from_checkpoint_path",
    "samplers",
    "to_device",
    "torch_batch_process",
]
