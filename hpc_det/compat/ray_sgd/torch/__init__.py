"""`ray.util.sgd.torch`."""

from __future__ import annotations

from hpc_det.sgd.driver.trainer import TorchTrainer
from hpc_det.sgd.operator.creators import CreatorSetup as CreatorOperator
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.tune.trainable import TorchTrainable as BaseTorchTrainable

__all__ = ["BaseTorchTrainable", "CreatorOperator", "TorchTrainer", "TrainingOperator"]
