"""A GPT-2 with Hugging Face's Trainer: sharded by FSDP and DeepSpeed, and with TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from tests.integrations.compared import Compared
from tests.integrations.forked import ForkedRuns

for needed in ("transformers", "trl", "deepspeed"):
    pytest.importorskip(needed)
pytestmark = pytest.mark.integration

SCRIPT = "tests.integrations.gpt_script"


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    runs = ForkedRuns(SCRIPT)
    yield runs
    runs.close()


def sharded(state_dict_type: str) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": state_dict_type}}


def zero(stage: int) -> dict[str, Any]:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {"deepspeed": {**dict.fromkeys(sizes, "auto"), "zero_optimization": {"stage": stage}}}


@pytest.mark.parametrize(
    ("options", "files"),
    [
        pytest.param(
            sharded("SHARDED_STATE_DICT"),
            {f"pytorch_model_fsdp_0/__{rank}_0.distcp" for rank in range(2)},
            id="FSDP",
        ),
        pytest.param(
            sharded("FULL_STATE_DICT"), {"pytorch_model_fsdp.bin"}, id="FSDP, whole on rank 0", marks=pytest.mark.long
        ),
        pytest.param(
            zero(2),
            {f"global_step8/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)},
            id="ZeRO 2",
            marks=pytest.mark.long,
        ),
        pytest.param(
            zero(3),
            {f"global_step8/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)},
            id="ZeRO 3",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_sharded_model_continues_to_the_bit(
    runs: ForkedRuns, tmp_path: Path, options: dict[str, Any], files: set[str]
) -> None:
    compared = Compared(runs, SCRIPT, tmp_path, 8, options, ranks=2)
    compared.assert_same(8)
    (checkpoint,) = (each for each in committed(Path(compared.stopped[0]["folder"], "checkpoints")) if each.steps == 8)
    assert files <= {str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*")}


def test_trls_trainer_continues_to_the_bit_and_reports_its_own_metrics(runs: ForkedRuns, tmp_path: Path) -> None:
    options = {"sft": True, "bf16": False, "eval_strategy": "steps", "eval_steps": 4}
    compared = Compared(runs, SCRIPT, tmp_path, 8, options)
    compared.assert_same(8)
    whole, resumed = compared.series
    assert [(kind, steps) for kind, steps, _ in whole] == [(kind, steps) for kind, steps, _ in resumed]
    metrics = [[without_counts(each) for _, _, each in series] for series in (whole, resumed)]
    assert metrics[0] == metrics[1]
    validations = [each for kind, _, each in whole if kind == "validation"]
    assert len(validations) == 3
    assert {"eval_loss", "eval_mean_token_accuracy"} <= validations[0].keys()
    assert "mean_token_accuracy" in whole[0][2]


def without_counts(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics without the numbers of tokens, which TRL counts from the beginning of a process."""
    return {name: value for name, value in metrics.items() if not name.endswith("num_tokens")}
