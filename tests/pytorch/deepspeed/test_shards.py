from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from hpc_det.checkpoint.committed import checksum
from hpc_det.core.distributed import Distributed
from hpc_det.errors import HpcDetError
from hpc_det.pytorch.deepspeed.shards import ShardFiles, refused_names
from tests.core.ranks import OnRanks
from tests.pytorch.deepspeed.engines import config, new_engine, new_pipeline, train

TAG = "model0"


def goes_on(distributed: Distributed, folder: Path, stage: int, pipeline: bool) -> list[str]:
    """The kinds of engine that did not go on, bit for bit, as they would have without a stop."""
    new = new_pipeline if pipeline else new_engine
    wrong = []
    # a pipeline of bf16 without ZeRO fails in DeepSpeed's own load: KeyError
    for dtype, gas in (("fp32", 1), ("fp32" if pipeline and stage == 0 else "bf16", 4)):
        kind = f"{dtype}, accumulation {gas}"
        undisturbed = new(distributed, config(stage, dtype=dtype, gas=gas))
        train(undisturbed, 0, 3)
        undisturbed.save_checkpoint(str(folder / kind), tag=TAG)
        resumed = new(distributed, config(stage, dtype=dtype, gas=gas), seed=2)
        resumed.load_checkpoint(str(folder / kind), tag=TAG)
        if train(resumed, 3, 3) != train(undisturbed, 3, 3) or resumed.get_lr() != undisturbed.get_lr():
            wrong.append(kind)
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_goes_on_to_the_bit(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, goes_on, tmp_path, stage, False) == [[], []]


@pytest.mark.parametrize("stage", [0, 1])
def test_pipelines_go_on_to_the_bit(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, goes_on, tmp_path, stage, True) == [[], []]


def saved(distributed: Distributed, folder: Path) -> list[dict[str, Any]]:
    """What `take` says of each engine's files."""
    files = ShardFiles()
    taken: list[dict[str, Any]] = []
    for engine in (new_engine(distributed, config(3)), new_pipeline(distributed, config(1))):
        engine.checkpoint_engine = files
        train(engine, 0, 1)
        engine.save_checkpoint(str(folder / "elsewhere"), tag=TAG)
        assert files.take(folder / str(len(taken))) == {}
        engine.save_checkpoint(str(folder / str(len(taken))), tag=TAG)
        taken.append({name: asdict(entry) for name, entry in files.take(folder / str(len(taken))).items()})
        assert files.take(folder) == {}
    return taken


def test_every_shard_is_known_by_its_checksum_to_the_rank_that_wrote_it(on_ranks: OnRanks, tmp_path: Path) -> None:
    for engine, of_ranks in enumerate(zip(*on_ranks(2, saved, tmp_path), strict=True)):
        folder = tmp_path / str(engine)
        written = {str(path.relative_to(folder)): asdict(checksum(path)) for path in folder.rglob("*.pt")}
        assert written == of_ranks[0] | of_ranks[1]
        assert not of_ranks[0].keys() & of_ranks[1].keys()
        assert len(written) == (4 if engine == 0 else 8)


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers(records).float().pow(2).mean())


def memory_to_save(distributed: Distributed, folder: Path) -> list[int]:
    """How much more than before this process held at once, in bytes, for each stage."""
    needed = []
    for stage in (0, 1, 2, 3):
        engine = new_engine(distributed, config(stage), net=Wide)
        engine.backward(engine(torch.ones(2, 1024)))
        engine.step()
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts anew
        before = peak_memory()
        engine.save_checkpoint(str(folder / str(stage)), tag=TAG)
        needed.append(peak_memory() - before)
    return needed


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def test_a_save_takes_no_second_copy_of_the_model(on_ranks: OnRanks, tmp_path: Path) -> None:
    model = 8 * 1024 * 1025 * 4
    for needed in on_ranks(2, memory_to_save, tmp_path):
        assert max(needed) < model / 4, needed


# --- what may be in a file

PLAIN = {
    "module": OrderedDict(weight=torch.arange(3.0)),
    "scaler": DynamicLossScaler(2.0, 2.0, 1000, 1.0, 1, False),
    "client": {"seen": np.arange(3), "rate": np.float64(0.5), "name": "a", "pair": (1, None)},
}


def test_plain_content_comes_back(tmp_path: Path) -> None:
    files = ShardFiles()
    files.save(PLAIN, str(tmp_path / "shard.pt"))
    loaded = files.load(str(tmp_path / "shard.pt"), map_location=lambda storage, place: storage)
    assert torch.equal(loaded["module"]["weight"], torch.arange(3.0))
    assert vars(loaded["scaler"]) == vars(PLAIN["scaler"])
    assert loaded["client"]["seen"].tolist() == [0, 1, 2]
    assert (loaded["client"]["rate"], loaded["client"]["pair"]) == (0.5, (1, None))


class Named:
    """Pickled as an attribute of something."""

    def __init__(self, owner: Any, name: str) -> None:
        self._call = getattr, (owner, name)

    def __reduce__(self) -> Any:
        return self._call


def test_the_stage_of_a_file_of_any_python_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    stages = [ZeroStageEnum.weights, Named(ZeroStageEnum, "weights")]  # the second: Python 3.11.2, which Debian 12 has
    torch.save({"zero_stage": stages}, path)
    assert refused_names(path) == []
    assert ShardFiles().load(str(path)) == {"zero_stage": [ZeroStageEnum.weights] * 2}


@pytest.mark.parametrize(("owner", "name"), [(ZeroStageEnum, "__new__"), (DynamicLossScaler, "__init__")])
def test_no_other_attribute_is_read(tmp_path: Path, owner: Any, name: str) -> None:
    path = tmp_path / "shard.pt"
    torch.save({"zero_stage": Named(owner, name)}, path)
    with pytest.raises(HpcDetError, match=rf"{path}: .*{name} of .* is not loaded, only a stage of ZeRO"):
        ShardFiles().load(str(path))


def test_what_no_resume_would_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    files = ShardFiles()
    with pytest.raises(HpcDetError) as raised:
        files.save({**PLAIN, "begun": {"on": date(2026, 1, 1)}}, str(tmp_path / "shard.pt"))
    assert raised.value.problems == [
        "shard.pt.begun.on: datetime.date cannot be part of a checkpoint; save tensors, numbers, texts, lists and maps "
        "of them"
    ]
    assert files.take(tmp_path) == {}


def test_a_file_that_could_run_code_is_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    torch.save({"module": Path("/")}, path)
    with pytest.raises(HpcDetError) as raised:
        ShardFiles().load(str(path))
    assert str(raised.value).startswith(f"{path}: holds more than tensors, numbers, texts, lists and maps")
    assert "pathlib" in str(raised.value)
    assert "take that out" in str(raised.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    ShardFiles().save(PLAIN, str(path))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(HpcDetError, match=r"shard.pt: cannot be read .*it may be damaged: use another checkpoint"):
        ShardFiles().load(str(path))
