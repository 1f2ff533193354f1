from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.core.loggers import LoggedTrial

Logged = Callable[..., LoggedTrial]


@pytest.fixture
def said() -> list[str]:
    """Return the messages of the loggers."""
    return []


@pytest.fixture
def logged(tmp_path: Path, said: list[str]) -> Logged:
    """Return a function that makes the facts of an attempt of trial 12/3, whose folder all attempts share."""

    def make(attempt: int = 1, *, reported: dict[str, int] | None = None, calls: int = 0) -> LoggedTrial:
        folder = tmp_path / "trials" / "3" / "loggers" / "some"
        folder.mkdir(parents=True, exist_ok=True)
        return LoggedTrial(
            folder=folder,
            experiment=12,
            trial=3,
            attempt=attempt,
            name="digits ä/é",
            labels=["demo"],
            hyperparameters={"lr": 0.1, "net": {"width": 64}},
            reported=reported or {},
            calls=calls,
            say=said.append,
        )

    return make
