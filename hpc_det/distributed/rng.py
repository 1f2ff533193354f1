"""The random number generators of a rank (Python's, numpy's, torch's, the GPU's): their seeds and their states.

States are tensors and numbers, which load without pickle.
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
    """`seed`: 0 .. 2**32-1 (numpy's range)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Everything `restore_rng` needs, as tensors and numbers (loadable with weights_only=True)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
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
    """After the block they are as before it, whatever was drawn within."""
    before = rng_state()
    yield
    restore_rng(before)


def restore_rng(state: dict[str, Any]) -> None:
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((3, tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    position, has_gauss, cached = numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"]
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def mixed_seed(*key: int | str) -> int:
    """64 bits to which every part of `key` contributes; the same on every machine and with every version."""
    text = repr([str(part) for part in key])  # a number of numpy's is no other than Python's
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generators(seed: int) -> None:
    """Python's, numpy's and torch's CPU generator. `seed`: 64 bits, of which torch's takes the lower half."""
    random.seed(seed)
    # All three are the Mersenne Twister; without one more word numpy's numbers would be the same as Python's.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks after GPUs too, at a hundred times the cost


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Those generators, seeded for the time of the block and put back after it."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
