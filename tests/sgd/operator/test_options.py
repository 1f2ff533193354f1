from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.operator.options import check_options
from tests.sgd.operators import classifier

GOOD: dict[str, Any] = {"use_fp16": False, "use_tqdm": False, "scheduler_step_freq": None}


@pytest.mark.parametrize("value", ["batch", "epoch", "manual", None])
def test_a_scheduler_steps_by_one_of_four_words(value: str | None) -> None:
    check_options(**{**GOOD, "scheduler_step_freq": value})


@pytest.mark.parametrize("value", ["apx", 1, None, "True"])
def test_a_use_fp16_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="use True, False or 'apex'"):
        check_options(**{**GOOD, "use_fp16": value})


@pytest.mark.parametrize("value", ["epochs", "", 3])
def test_another_scheduler_step_freq_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"scheduler_step_freq: .*; use 'batch', 'epoch', 'manual' or None"):
        check_options(**{**GOOD, "scheduler_step_freq": value})


def test_all_that_cannot_be_is_said_at_once_by_an_operator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_tqdm(name: str, *rest: Any) -> Any:
        return None if name == "tqdm" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_tqdm)
    with pytest.raises(UsageError, match=r"pip install 'hpc_det\[tqdm\]'") as raised:
        classifier(use_fp16="apx", use_tqdm=True, scheduler_step_freq="epochs")
    assert isinstance(raised.value, ValueError)
    assert len(raised.value.problems) == 3
    assert raised.value.problems[-1].endswith("did you mean 'epoch'?")
