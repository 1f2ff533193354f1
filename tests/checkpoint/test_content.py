from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.content import load
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def saved_function() -> None:
    """Nobody may save it."""


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "write", [torch.save, lambda evil, file: pickle.dump(evil, file, protocol=2)], ids=["torch", "pickle"]
)
def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, write: Any) -> None:
    victim, file = tmp_path / "executed", io.BytesIO()
    write({"weights": Evil(victim)}, file)
    (tmp_path / "planted.pth").write_bytes(file.getvalue())
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "planted.pth")
    assert not victim.exists()
    torch.load(tmp_path / "planted.pth", weights_only=False) if write is torch.save else pickle.loads(file.getvalue())
    assert victim.exists(), "the trap itself is dull"


class Pair(NamedTuple):
    first: int
    second: int


class Level(IntEnum):
    LOW = 0


KEPT: list[Any] = [
    {"steps": 3, "best": 0.5, "name": "ä", "none": None, "flag": True, "wave": 1j, 7: b"", "raw": b"ab"},
    [torch.ones(2), nn.Parameter(torch.ones(2)), torch.float32, torch.device("cpu"), torch.Size([2])],
    (OrderedDict(a=1), Counter("aab"), {1, 2}, bytearray(b"ab")),
    {
        "best": np.float64(0.4),
        "seen": np.int32(2),
        "flag": np.bool_(True),
        "history": np.arange(3.0),
        "name": np.str_("ä"),
    },
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [1, 2]).state_dict(),
]

REFUSED = {
    "pathlib.PosixPath": Path("/"),
    "collections.defaultdict": defaultdict(int, a=1),
    "tests.checkpoint.test_content.Pair": Pair(1, 2),
    "tests.checkpoint.test_content.Level": Level.LOW,
    "builtins.frozenset": frozenset([1]),
    "builtins.function": saved_function,
    "object array": np.array([{}], dtype=object),
    "numpy.datetime64": np.datetime64("2024-01-01"),
}


def rows(value: Any) -> Any:
    """Comparable with ==."""
    if isinstance(value, dict):
        return type(value), [(key, rows(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [rows(item) for item in value]
    return type(value), value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


@pytest.mark.parametrize("state", KEPT)
def test_what_a_save_takes_a_resume_loads(folder: Path, state: Any) -> None:
    context = CheckpointContext(folder, Distributed())
    uuid = context.save(1, {"state_dict.pth": {"callbacks": {"mine": state}}}, lambda _: None)
    back = load(folder / uuid / "state_dict.pth")["callbacks"]["mine"]
    assert rows(back) == rows(state)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_resume_would_not_load_is_refused_at_the_save(folder: Path, tmp_path: Path, kind: str) -> None:
    context = CheckpointContext(folder, Distributed())
    said = rf"state_dict.pth: callbacks.mine.where\[1\]: (pathlib\._local)?{kind} cannot be part of a checkpoint"
    with pytest.raises(HpcDetError, match=said):
        context.save(1, {"state_dict.pth": {"callbacks": {"mine": {"where": [0, REFUSED[kind]]}}}}, lambda _: None)
    assert context.newest() is None
    assert not list(folder.iterdir())
    torch.save(REFUSED[kind], tmp_path / "a.pth")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "a.pth")


def test_keys_are_looked_at_too(folder: Path) -> None:
    context = CheckpointContext(folder, Distributed())
    with pytest.raises(HpcDetError, match=r"state_dict.pth: the key \(.*Path.*\)\[1\]: pathlib\S*Path cannot be part"):
        context.save(1, {"state_dict.pth": {(1, Path("/")): 1}}, lambda _: None)
