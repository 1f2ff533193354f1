"""`ray.util.sgd.torch.torch_trainer`."""

from __future__ import annotations

from hpc_det.sgd.driver.trainer import TorchTrainer
from hpc_det.sgd.tune.trainable import TorchTrainable as BaseTorchTrainable

__all__ = ["BaseTorchTrainable", "TorchTrainer"]
