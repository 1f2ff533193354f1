"""Once per rank: PyTorchTrial, its context, data and the training loop."""

from hpc_det.pytorch.callback import PyTorchCallback
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.data import DataLoader, TorchData
from hpc_det.pytorch.lr_scheduler import LRScheduler
from hpc_det.pytorch.trial import PyTorchTrial

__all__ = ["DataLoader", "LRScheduler", "PyTorchCallback", "PyTorchTrial", "PyTorchTrialContext", "TorchData"]
