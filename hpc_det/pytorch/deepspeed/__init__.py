"""DeepSpeedTrial, its context and what they are configured with. Alone here deepspeed is imported."""

# ruff: noqa: E402  # DeepSpeed must be there, and chooses its accelerator, before anything imports it

from __future__ import annotations

import os

import torch

from hpc_det.pytorch.deepspeed.installed import check_installed

check_installed()
# DeepSpeed chooses at its import, and warns on every rank where it finds no GPU by itself.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from hpc_det.pytorch.deepspeed.config import get_ds_config_from_hparams, overwrite_deepspeed_config
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.trainer import Trainer, init
from hpc_det.pytorch.deepspeed.trial import DeepSpeedTrial
from hpc_det.pytorch.strategies.model_parallel import ModelParallelUnit, make_data_parallel_mpu, make_deepspeed_mpu

__all__ = [
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "ModelParallelUnit",
    "Trainer",
    "get_ds_config_from_hparams",
    "init",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]
