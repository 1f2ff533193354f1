from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from hpc_det.checkpoint.checkpoints import CheckpointContext, Put
from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.pinned_staging import PinnedStaging
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError
from hpc_det.pytorch.deepspeed.checkpoint_engine import ShardFiles, refused_names
from tests.distributed.ranks import OnRanks
from tests.facts import keys, refused
from tests.pytorch.deepspeed.engines import config, new_engine, new_pipeline, train

TAG = "model0"


def differing_kinds(distributed: Distributed, folder: Path, stage: int, pipeline: bool) -> list[str]:
    """Return the kinds of engine that, after a resume, differ in any bit from an engine without a stop."""
    new = new_pipeline if pipeline else new_engine
    wrong = []
    # a bf16 pipeline without ZeRO fails in DeepSpeed's load with a KeyError
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


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1)), 2, 3])
def test_every_stage_goes_on_to_the_bit(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, differing_kinds, tmp_path, stage, False) == [[], []]


@pytest.mark.parametrize("stage", [0, 1])
def test_pipelines_go_on_to_the_bit(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, differing_kinds, tmp_path, stage, True) == [[], []]


def trains_alike_during_a_write(distributed: Distributed, folder: Path) -> list[bool]:
    """Return, for each engine, whether the loaded engine trains like the saved one, which kept training during the
    write.
    """
    same = []
    for new, stage in ((new_engine, 1), (new_engine, 3), (new_pipeline, 1)):
        engine = new(distributed, config(stage, dtype="bf16"))
        engine.checkpoint_engine = files = ShardFiles()
        train(engine, 0, 3)

        def write(partial: Path, put: Put, engine: Any = engine, files: ShardFiles = files) -> None:
            with files.part_of(partial, put):
                engine.save_checkpoint(str(partial), tag=TAG)

        checkpoints = CheckpointContext(folder, distributed)
        uuid = checkpoints.begin(3, {}, write=write)
        losses = train(engine, 3, 3)
        checkpoints.settled(wait=True)
        resumed = new(distributed, config(stage, dtype="bf16"), seed=2)
        resumed.load_checkpoint(str(folder / uuid), tag=TAG)
        same.append(train(resumed, 3, 3) == losses)
    return same


def test_an_engine_may_go_on_while_its_files_are_written(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, trains_alike_during_a_write, tmp_path) == [[True] * 3] * 2
    first = committed(tmp_path)[0]
    assert not first.damage()
    assert len([name for name in first.files if name.endswith(".pt")]) >= 4


def names_put(distributed: Distributed, folder: Path) -> list[list[str]]:
    """Return the names of the files that each engine saves on this rank."""
    files, names = ShardFiles(), []
    for engine in (new_engine(distributed, config(3)), new_pipeline(distributed, config(1))):
        engine.checkpoint_engine = files
        train(engine, 0, 1)
        put: list[str] = []
        with files.part_of(folder, lambda name, content, put=put: put.append(name)):  # type: ignore[misc]
            engine.save_checkpoint(str(folder), tag=TAG)
        names.append(put)
    engine.save_checkpoint(str(folder), tag="later")
    return names


def test_every_shard_is_put_into_the_checkpoint_by_one_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    for engine, of_ranks in enumerate(zip(*on_ranks(2, names_put, tmp_path), strict=True)):
        names = [*of_ranks[0], *of_ranks[1]]
        assert len(names) == len({*names}) == (4 if engine == 0 else 8)
    assert not list(tmp_path.glob(f"{TAG}/*.pt"))
    assert len(list(tmp_path.glob("later/*.pt"))) == 8, "a save to another folder is written without `put`"


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers(records).float().pow(2).mean())


def memory_to_save(distributed: Distributed, folder: Path) -> list[tuple[int, int, int]]:
    """Return for each stage the additional peak memory of this process, in bytes: while files are written, and while
    they are copied; and the size of the copies.
    """
    needed = []
    for stage in (0, 1, 2, 3):
        engine = new_engine(distributed, config(stage), net=Wide)
        engine.backward(engine(torch.ones(2, 1024)))
        engine.step()
        engine.checkpoint_engine = files = ShardFiles()
        copies, kept = PinnedStaging(), dict[str, Any]()

        def copy(name: str, content: Any, copies: Any = copies, kept: Any = kept) -> None:
            kept[name] = copies.copy_more(content)

        written = memory_for(lambda engine=engine, to=str(folder / str(stage)): engine.save_checkpoint(to, tag=TAG))  # type: ignore[misc]
        with files.part_of(folder, copy):
            copied = memory_for(lambda engine=engine: engine.save_checkpoint(str(folder), tag=TAG))  # type: ignore[misc]
        needed.append((written, copied, sum((folder / str(stage) / name).stat().st_size for name in kept)))
    return needed


def memory_for(save: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (proc(5))
    before = peak_memory()
    save()
    return peak_memory() - before


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def test_a_save_takes_one_copy_of_the_state_at_most(on_ranks: OnRanks, tmp_path: Path) -> None:
    """A state has the size of about three models: the momenta and, for one model, the weights in float32."""
    model = 8 * 1024 * 1025 * 4
    for of_rank in on_ranks(2, memory_to_save, tmp_path):
        for written, copied, size in of_rank:
            assert written < model * 3 / 4, of_rank
            assert copied < size + model / 2, of_rank


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
    """An object that is pickled as an attribute of another one."""

    def __init__(self, owner: Any, name: str) -> None:
        self._call = getattr, (owner, name)

    def __reduce__(self) -> Any:
        return self._call


def test_the_stage_of_a_file_of_any_python_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    stages = [ZeroStageEnum.weights, Named(ZeroStageEnum, "weights")]  # the second: Python 3.11.2, as in Debian 12
    torch.save({"zero_stage": stages}, path)
    assert refused_names(path) == []
    assert ShardFiles().load(str(path)) == {"zero_stage": [ZeroStageEnum.weights] * 2}


@pytest.mark.parametrize(("owner", "name"), [(ZeroStageEnum, "__new__"), (DynamicLossScaler, "__init__")])
def test_no_other_attribute_is_read(tmp_path: Path, owner: Any, name: str) -> None:
    path = tmp_path / "shard.pt"
    torch.save({"zero_stage": Named(owner, name)}, path)
    with refused(HpcDetError, f"{path}: ", f"{name} of", owner.__name__):
        ShardFiles().load(str(path))


def test_what_no_resume_would_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    files = ShardFiles()
    with refused(HpcDetError, "datetime.date") as raised:
        files.save({**PLAIN, "begun": {"on": date(2026, 1, 1)}}, str(tmp_path / "shard.pt"))
    assert keys(raised.value.problems) == ["shard.pt.begun.on"]
    assert not list(tmp_path.iterdir())


def test_a_file_that_could_run_code_is_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    torch.save({"module": Path("/")}, path)
    with refused(HpcDetError, f"{path}: ", "tensors", "pathlib", "weights_only=False"):
        ShardFiles().load(str(path))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    ShardFiles().save(PLAIN, str(path))
    path.write_bytes(path.read_bytes()[:500])
    with refused(HpcDetError, f"{path}: ", "damaged", "checkpoint"):
        ShardFiles().load(str(path))
