"""DeepSpeedTrial, its context and its configuration. Only this package imports deepspeed."""

# ruff: noqa: E402  # DeepSpeed must be there, and chooses its accelerator, before anything imports it

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys

import torch

from hpc_det.errors import pip_install

AT_LEAST, BELOW = (0, 19), (0, 20)
"""Supported versions, from AT_LEAST to below BELOW.

0.18 breaks ZeRO with torch 2.13, and checkpoint_engine.py and universal.py depend on the file formats of 0.19.
"""


def check_installed() -> None:
    """Raise ModuleNotFoundError or ImportError, with the command to run, unless a supported DeepSpeed is installed."""
    remedy = f"run {pip_install('hpc_det[deepspeed]')}"
    if importlib.util.find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            f"hpc_det.pytorch.deepspeed needs DeepSpeed, which is not installed for {sys.executable}; {remedy}",
            name="deepspeed",
        )
    found = importlib.metadata.version("deepspeed")
    if not AT_LEAST <= _numbers(found) < BELOW:
        wanted = ">={}.{},<{}.{}".format(*AT_LEAST, *BELOW)
        raise ImportError(
            f"hpc_det.pytorch.deepspeed needs DeepSpeed {wanted}, and {sys.executable} has {found}; {remedy}",
            name="deepspeed",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


check_installed()
# DeepSpeed chooses its accelerator when it is imported. Without this variable it warns on every rank without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from hpc_det.pytorch.deepspeed.config import get_ds_config_from_hparams, overwrite_deepspeed_config
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.trial import DeepSpeedTrial, init
from hpc_det.pytorch.loop.trainer import Trainer
from hpc_det.pytorch.strategies.strategy import ModelParallelUnit, make_data_parallel_mpu, make_deepspeed_mpu

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
