"""A search of one trial, for runs of a script without a job: it requests lengths one after the other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hpc_det.checkpoint.retention import Policy
from hpc_det.core.run import JobServices, Run


class Lengths:
    """Requests `lengths`, and no more in this attempt after the length at which the trial waits for its promotion.

    The reports are in a file, as they are in the journal of a search.
    """

    def __init__(self, journal: Path, lengths: list[int], pauses_at: int) -> None:
        self._journal, self._lengths, self._pauses_at = journal, lengths, pauses_at
        self._reported: list[list[float]] = json.loads(journal.read_text()) if journal.exists() else []
        self._is_paused = False

    def compares(self) -> bool:
        return True

    def has_work(self) -> bool:
        return self.until() is not None

    def until(self) -> int | None:
        done = len(self._reported)
        return None if self._is_paused or done == len(self._lengths) else self._lengths[done]

    def report(self, value: float | None, batches: int | None = None) -> int | None:
        length = self.until()
        assert length is not None
        assert value is not None
        self._reported.append([length, value])
        self._journal.write_text(json.dumps(self._reported))
        self._is_paused = length == self._pauses_at
        return self.until()

    def end(self, value: float | None = None, batches: int = 0) -> None:
        raise AssertionError("the training ended before the length that the search requested")

    def may_come_back(self) -> bool:
        return len(self._reported) < len(self._lengths)


@contextmanager
def searched(journal: Path, lengths: list[int], pauses_at: int) -> Iterator[None]:
    """In the block, `hpc_det.core.init` takes part in the search."""
    code = journal.with_name("code")
    code.mkdir(exist_ok=True)
    policy = Policy()

    module = importlib.import_module("hpc_det.core.init")
    outside_job = module._outside_job

    @contextmanager
    def with_search(*arguments: Any) -> Iterator[Run]:
        with outside_job(*arguments) as run:
            search: Any = Lengths(journal, lengths, pauses_at)
            services = JobServices(code=code, searcher=search, retention=lambda: policy, mirror=None, grace_s=None)
            yield replace(run, job=services)

    with patch.object(module, "_outside_job", with_search):
        yield
