from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.committed import checksum
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch.deepspeed.universal import Facts, engine_facts, load_engine, obstacles
from tests.distributed.ranks import OnRanks
from tests.facts import each_names, refused, unnamed
from tests.pytorch.deepspeed.engines import Net, config, new_engine, new_pipeline, train

TAG = "model0"
GLOBAL_BATCH = 8
EVERY = ["fp32-0", "fp32-1", "fp32-2", "fp32-3", "bf16-0", "bf16-1", "bf16-2", "bf16-3"]


def tolerance(kind: str) -> float:
    """Return the relative tolerance of losses: another number of ranks adds up gradients in another order."""
    return 1e-2 if kind.startswith("bf16") else 1e-5


class TwoGroups(Net):
    """The parameters of the last layer have different settings."""

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [*self.first.parameters()], "lr": 0.02},
            {"params": [*self.second.parameters()], "lr": 0.001, "weight_decay": 0.3},
        ]


def engine_of(distributed: Distributed, kind: str, seed: int) -> Any:
    """Create an engine. `kind` is fp32-1, bf16-3, pipeline-1, groups-3..., with the ZeRO stage."""
    what, stage = kind.split("-")
    if what == "pipeline":
        settings = config(int(stage), micro=GLOBAL_BATCH // (distributed.size // 2))
        return new_pipeline(distributed, settings, seed=seed)
    dtype = "bf16" if what == "bf16" else "fp32"
    settings = config(int(stage), dtype=dtype, micro=GLOBAL_BATCH // distributed.size)
    if what != "groups":
        return new_engine(distributed, settings, seed=seed)
    del settings["optimizer"], settings["scheduler"]
    return new_engine(distributed, settings, seed=seed, net=TwoGroups, groups=TwoGroups.groups)


def losses(distributed: Distributed, engine: Any, first: int) -> list[float]:
    """Train three global batches and return the mean loss of each."""
    of_ranks = torch.tensor(distributed.gather_json(train(engine, first, 3)))
    return [float(loss) for loss in of_ranks.mean(0)]


def seen(engine: Any) -> list[float]:
    """Return the counters of the engine, its learning rates and the buffers of its module."""
    counted = [engine.global_steps, engine.global_samples, *engine.get_lr()]
    return [*counted, *(float(buffer) for buffer in engine.module.buffers())]


def save(distributed: Distributed, folder: Path, kinds: list[str]) -> dict[str, Any]:
    """Save an engine of each kind; return its facts, counters and buffers, and the losses of the following batches."""
    saved = {}
    for kind in kinds:
        engine = engine_of(distributed, kind, seed=1)
        train(engine, 0, 3)
        engine.save_checkpoint(str(folder / kind), tag=TAG)
        saved[kind] = {"facts": engine_facts(engine), "seen": seen(engine), "losses": losses(distributed, engine, 3)}
    return saved


def load(distributed: Distributed, folder: Path, saved: dict[str, Any]) -> dict[str, Any]:
    aside = folder / "aside"
    found = {}
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # as users set it to load old files
    for kind, of_it in saved.items():
        engine = engine_of(distributed, kind, seed=2)
        load_engine(engine, folder / kind / TAG, of_it["facts"], distributed, aside=aside)
        found[kind] = {"seen": seen(engine), "losses": losses(distributed, engine, 3)}
    assert not aside.exists() or not [*aside.iterdir()]
    said = {name: value for name, value in os.environ.items() if "WEIGHTS_ONLY" in name}
    assert said == {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    return found


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        # Each kind with a ZeRO stage is converted in a separate process, which takes seconds.
        pytest.param(2, 1, ["fp32-0", "bf16-2"], id="fewer"),
        pytest.param(1, 2, ["groups-3"], id="more", marks=pytest.mark.long),
        pytest.param(4, 2, ["pipeline-0", "pipeline-1"], id="pipelines", marks=pytest.mark.long),
        pytest.param(4, 2, [*EVERY, "groups-2"], id="every kind, fewer", marks=pytest.mark.long),
        pytest.param(1, 2, [*EVERY, "groups-2"], id="every kind, more", marks=pytest.mark.long),
    ],
)
def test_training_goes_on_with_another_number_of_ranks(
    on_ranks: OnRanks, tmp_path: Path, before: int, after: int, kinds: list[str]
) -> None:
    saved = on_ranks(before, save, tmp_path, kinds)[0]
    whole = {path: checksum(path) for path in tmp_path.rglob("*.pt")}
    for found in on_ranks(after, load, tmp_path, saved):
        for kind, of_it in saved.items():
            assert found[kind]["seen"] == pytest.approx(of_it["seen"]), kind
            assert found[kind]["losses"] == pytest.approx(of_it["losses"], rel=tolerance(kind)), kind
    assert {path: checksum(path) for path in tmp_path.rglob("*.pt")} == whole


# --- weights alone


def result(engine: Any) -> float:
    """Return the output of the module for records that do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(3)
    records = torch.randn(GLOBAL_BATCH, 8, generator=generator)
    wanted = torch.ones(GLOBAL_BATCH)
    if hasattr(engine, "num_stages"):
        return float(engine.eval_batch(iter([(records, wanted)] * 4)))
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    with torch.no_grad():
        return float(engine(records.to(dtype), wanted))


def save_trained(distributed: Distributed, folder: Path, kinds: list[str]) -> dict[str, tuple[Facts, float]]:
    saved = {}
    for kind in kinds:
        engine = engine_of(distributed, kind, seed=1)
        train(engine, 0, 3)
        saved[kind] = engine_facts(engine), result(engine)
        engine.save_checkpoint(str(folder / kind), tag=TAG)
    return saved


def load_weights(distributed: Distributed, folder: Path, saved: dict[str, tuple[Facts, float]]) -> dict[str, Any]:
    found = {}
    for kind, (facts, _) in saved.items():
        engine = engine_of(distributed, kind, seed=2)
        load_engine(engine, folder / kind / TAG, facts, distributed, aside=folder / "aside", weights_alone=True)
        first = result(engine)
        steps = engine.global_steps
        train(engine, 0, 1)  # shows that the optimizer uses the loaded weights
        found[kind] = first, steps, abs(result(engine) - first) < 1
    return found


NOT_CONVERTED = ["fp32-0", "fp32-1", "fp32-2", "bf16-2"]
"""Kinds of engine whose weights are loaded without a conversion."""


@pytest.mark.parametrize(
    ("after", "kinds"),
    [
        (2, [*NOT_CONVERTED, "fp32-3", "bf16-3"]),
        *(pytest.param(1, kinds, marks=pytest.mark.long) for kinds in ([*NOT_CONVERTED, "fp32-3"], ["bf16-3"])),
    ],
)
def test_weights_alone_are_the_same_to_the_bit(on_ranks: OnRanks, tmp_path: Path, after: int, kinds: list[str]) -> None:
    saved = on_ranks(2, save_trained, tmp_path, kinds)[0]
    for found in on_ranks(after, load_weights, tmp_path, saved):
        assert found == {kind: (value, 0, True) for kind, (_, value) in saved.items()}


def test_weights_alone_of_a_pipeline_are_the_same_to_the_bit(on_ranks: OnRanks, tmp_path: Path) -> None:
    saved = on_ranks(2, save_trained, tmp_path, ["pipeline-0", "pipeline-1"])[0]
    for found in on_ranks(2, load_weights, tmp_path, saved):
        assert found == {kind: (value, 0, True) for kind, (_, value) in saved.items()}


# --- what is refused

SAVED: Facts = {
    "zero_stage": 2,
    "data_parallel_size": 2,
    "pipeline_stages": 1,
    "model_parallel_size": 1,
    "dtype": "fp32",
    "experts": False,
    "tied_layers": False,
    "optimizer_states": ["exp_avg", "exp_avg_sq", "step"],
}


@pytest.mark.parametrize(
    ("saved", "now", "weights_alone", "expected"),
    [
        ({}, {}, False, []),
        ({}, {"data_parallel_size": 4}, False, []),
        (
            {"pipeline_stages": 2},
            {"pipeline_stages": 4},
            True,
            [["pipeline stages", 2, 4]],
        ),
        (
            {},
            {"model_parallel_size": 2, "zero_stage": 3, "dtype": "bf16"},
            False,
            [
                ["model-parallel size", 1, 2],
                ["ZeRO stage", 2, 3],
                ["dtype", "fp32", "bf16"],
            ],
        ),
        ({}, {"zero_stage": 0, "dtype": "bf16"}, True, []),
        ({"zero_stage": 3}, {}, True, [["ZeRO stage", 3, 2]]),
        (
            {"optimizer_states": ["momentum_buffer"]},
            {"data_parallel_size": 1},
            False,
            [["data-parallel ranks", 2, 1, "(exp_avg, exp_avg_sq)", "momentum_buffer"]],
        ),
        ({"optimizer_states": ["momentum_buffer"]}, {"data_parallel_size": 1}, True, []),
        (
            {"experts": True, "tied_layers": True},
            {"experts": True, "tied_layers": True, "data_parallel_size": 4},
            False,
            [
                ["data-parallel ranks", 2, 4, "mixtures of experts"],
                ["data-parallel ranks", 2, 4, "tied layers"],
            ],
        ),
    ],
)
def test_what_deepspeed_cannot_do_is_said_with_both_values(
    saved: Facts, now: Facts, weights_alone: bool, expected: list[list[object]]
) -> None:
    found = obstacles({**SAVED, **saved}, {**SAVED, **now}, weights_alone=weights_alone)
    each_names(found, *expected)


def refusal(distributed: Distributed, folder: Path) -> tuple[str, Facts]:
    engine = engine_of(distributed, "fp32-2", seed=2)
    before = result(engine)
    with pytest.raises(UsageError) as raised:
        load_engine(engine, folder / TAG, {**SAVED, "zero_stage": 1}, distributed, aside=folder)
    assert result(engine) == before
    with refused(HpcDetError, "shards"):
        load_engine(engine, folder / TAG, SAVED, distributed, aside=folder)
    return str(raised.value), json.loads(json.dumps(engine_facts(engine)))


def test_a_refusal_says_where_it_would_go_on(on_ranks: OnRanks, tmp_path: Path) -> None:
    [(said, facts)] = on_ranks(1, refusal, tmp_path)
    assert unnamed(said, f"{tmp_path}/{TAG}: ", "ZeRO stage 1", 2, "2 slots") == []
    assert facts == {**SAVED, "data_parallel_size": 1, "optimizer_states": []}


class Touch:
    """Would create a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def load_and_fail(distributed: Distributed, folder: Path, saved: dict[str, Any]) -> list[str]:
    said = []
    for kind, of_it in saved.items():
        with pytest.raises(HpcDetError) as raised:
            load_engine(engine_of(distributed, kind, 2), folder / kind / TAG, of_it["facts"], distributed, aside=folder)
        said.append(str(raised.value))
    return said


def test_conversion_runs_no_code_of_a_shard_and_leaves_nothing_behind(on_ranks: OnRanks, tmp_path: Path) -> None:
    saved = on_ranks(2, save, tmp_path, ["fp32-2"])[0]
    shard = tmp_path / "fp32-2" / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({**torch.load(shard, weights_only=False), "more": Touch(tmp_path / "touched")}, shard)
    [[said]] = on_ranks(1, load_and_fail, tmp_path, saved)
    assert unnamed(said, f"{shard.parent}: ", "data-parallel ranks", shard.name, "pathlib.PosixPath", "tensors") == []
    assert [path.name for path in tmp_path.iterdir()] == ["fp32-2"]
