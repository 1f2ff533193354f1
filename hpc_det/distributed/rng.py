"""The random number generators of a rank (Python, numpy, torch and the GPU): their seeds and their states.

A state consists of tensors and numbers, which load without pickle.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, GPUs included, with `seed`: 0 to 2**32 - 1 (numpy's range)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states that `restore_rng` takes, as tensors and numbers (loadable with weights_only=True)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    # `restore_rng` assumes these formats, the only ones that numpy and Python 3 write
    assert name == "MT19937"
    assert version == 3
    state: dict[str, Any] = {
        "python": {"words": torch.from_numpy(np.array(words, dtype=np.int64)), "gauss": gauss},
        "numpy": {
            "keys": torch.tensor(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the generators at the end of the block to their states at its start."""
    before = rng_state()
    yield
    restore_rng(before)


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to a `state` from `rng_state`; the GPU's only if the state has one and there is a GPU."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((3, tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    position, has_gauss, cached = numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"]
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def mixed_seed(*key: int | str) -> int:
    """Return 64 bits that depend on every part of `key`, and are the same on every machine and with every version."""
    text = repr([str(part) for part in key])  # str: repr distinguishes numpy's integers from Python's
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generators(seed: int) -> None:
    """Seed Python, numpy and torch's CPU generator with `seed`, 64 bits; torch uses only the lower half."""
    random.seed(seed)
    # All three are Mersenne Twisters; without the additional word numpy would draw the same numbers as Python.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds GPUs, at a hundred times the cost


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators (see `seed_generators`) for the block and restore them after it, also on errors."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
