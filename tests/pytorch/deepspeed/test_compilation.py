from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from hpc_det.pytorch.deepspeed.compilation import report_compilations
from hpc_det.store.attempt import Attempt
from tests.store.test_attempt import ATTEMPT


class Builder(OpBuilder):  # type: ignore[misc]  # deepspeed has no types
    """An op whose compilation is `compile`."""

    def __init__(self, compile: Callable[[], Any]) -> None:
        super().__init__("fused_test")
        self.compile = compile

    def absolute_name(self) -> str:
        return "tests.fused_test"

    def sources(self) -> list[str]:
        return []


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Return the attempt of this process, as its rank 0."""
    attempt = replace(ATTEMPT, folder=str(tmp_path))
    attempt.trial.compilation(attempt.number).parent.mkdir()
    for name, value in {**attempt.to_env(), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(OpBuilder, "jit_load", lambda builder, verbose=True: builder.compile())
    report_compilations()
    report_compilations()
    return attempt


def times(attempt: Attempt) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(attempt.trial.compilation(attempt.number).read_text())
    return found


def test_a_compilation_is_in_the_file_while_it_lasts(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    during = Builder(lambda: times(attempt)).jit_load(verbose=False)
    after = times(attempt)
    assert during["ended"] is None
    assert after["began"] == during["began"] <= after["ended"]
    assert [("fused_test" in line) for line in capsys.readouterr().out.splitlines()] == [True, True]


def test_a_compilation_that_fails_has_ended_too(attempt: Attempt) -> None:
    with pytest.raises(ZeroDivisionError):
        Builder(lambda: 1 / 0).jit_load()
    assert times(attempt)["ended"] is not None


def test_only_rank_0_of_a_job_writes_the_file(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert Builder(lambda: 7).jit_load() == 7
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("HPC_DET_FOLDER")
    assert Builder(lambda: 7).jit_load() == 7
    assert not attempt.trial.compilation(attempt.number).exists()
