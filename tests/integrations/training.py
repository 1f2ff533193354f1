"""What the trainings of the adapters have in common: data, a model with dropout, a stop, a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hpc_det.core import Core

RECORDS, BATCHES, PASSES = 48, 6, 3
"""Records, batches of a pass with a global batch size of 8, and passes."""
INIT: dict[str, Any] = {"hparams": {"lr": 0.05}, "config": {"reproducibility": {"experiment_seed": 3}}, "name": "run"}


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        features = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return features, features.sum()[None]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def stop_now(core: Core) -> None:
    """Send this process the signal of a preemption, and wait until the ranks agree on a stop."""
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for_stop(core)


def wait_for_stop(core: Core) -> None:
    while not core._run.stop.noticed:
        time.sleep(0.001)


def write(result: str, value: Any) -> None:
    """Write the result of this rank for tests.integrations.forked."""
    Path(f"{result}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(value))


def fingerprint(*states: Iterable[Any]) -> str:
    """Return a hash of all tensors and numbers in the states."""
    return hashlib.sha1(b"".join(map(_bytes, states))).hexdigest()


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().numpy().tobytes()
    if isinstance(state, dict):
        return b"".join(_bytes(each) for key in state for each in (str(key), state[key]))
    if isinstance(state, list | tuple):
        return b"".join(map(_bytes, state))
    return repr(state).encode()
