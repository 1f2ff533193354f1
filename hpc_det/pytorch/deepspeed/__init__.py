"""Training with DeepSpeed engines: the one place that imports deepspeed."""

from __future__ import annotations

import os

import torch

from hpc_det.pytorch.deepspeed.installed import check_installed

check_installed()
# DeepSpeed chooses at its import, and warns on every rank where it finds no GPU by itself.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
