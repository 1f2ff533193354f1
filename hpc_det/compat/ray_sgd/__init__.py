"""`ray.util.sgd`: its names are those of hpc_det.sgd, in the modules in which RaySGD has them."""

from __future__ import annotations

from hpc_det.compat.ray_sgd import meters as utils
from hpc_det.compat.ray_sgd import torch
from hpc_det.sgd.driver.trainer import TorchTrainer

__all__ = ["TorchTrainer", "torch", "utils"]
