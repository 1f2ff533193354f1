from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.operator.options import check_options
from tests.facts import keys, refused, unnamed
from tests.sgd.operators import classifier

GOOD: dict[str, Any] = {"use_fp16": False, "use_tqdm": False, "scheduler_step_freq": None}


@pytest.mark.parametrize("value", ["batch", "epoch", "manual", None])
def test_a_scheduler_steps_by_one_of_four_words(value: str | None) -> None:
    check_options(**{**GOOD, "scheduler_step_freq": value})


@pytest.mark.parametrize("value", ["apx", 1, None, "True"])
def test_a_use_fp16_that_is_none_is_refused(value: Any) -> None:
    with refused(ValueError, "use_fp16", "'apex'"):
        check_options(**{**GOOD, "use_fp16": value})


@pytest.mark.parametrize("value", ["epochs", "", 3])
def test_another_scheduler_step_freq_is_refused(value: Any) -> None:
    with refused(ValueError, "scheduler_step_freq", "'batch'", "'epoch'", "'manual'", "None"):
        check_options(**{**GOOD, "scheduler_step_freq": value})


def test_all_that_cannot_be_is_said_at_once_by_an_operator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_tqdm(name: str, *rest: Any) -> Any:
        return None if name == "tqdm" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_tqdm)
    with pytest.raises(UsageError) as raised:
        classifier(use_fp16="apx", use_tqdm=True, scheduler_step_freq="epochs")
    assert isinstance(raised.value, ValueError)
    assert keys(raised.value.problems) == ["use_fp16", "use_tqdm", "scheduler_step_freq"]
    assert unnamed(str(raised.value), "'apx'", "hpc_det[tqdm]", "'epoch'") == []
