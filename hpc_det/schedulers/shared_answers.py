"""What a scheduler has said of jobs, shared by all processes below a state root: one asks for all, the others read.

A site's one controller answers everybody, so whoever polls goes through here. The file is replaced as a whole. Who asks
holds a mark that exists meanwhile; one that a dead process left behind counts for no longer than a query can take.
Where the folder cannot be used, everybody asks: nothing depends on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_det.node.files import is_own, make_private
from hpc_det.node.json_files import Shape, read_map, write_json
from hpc_det.schedulers.scheduler import TIMEOUT_S, JobState, JobStatus, Run, Scheduler

ASK_S = 2.0
"""Between two queries, at least."""
WANTED_S = 120.0
"""Seconds after the last request for a job until it is left out of queries."""
WAIT_S = 0.05
PATIENCE_S = 10.0
"""Seconds to wait for the query of another process before this one asks as well."""


class SharedAnswers:
    def __init__(self, root: Path, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._root = root
        self._file = root / ".scheduler" / f"{type(scheduler).__name__.lower()}.json"
        self._mark = self._file.with_suffix(".asking")

    def status(self, job_ids: Sequence[str], run: Run, *, since: float | None = None) -> dict[str, JobStatus]:
        """An answer that is no older than `ASK_S`, or one to a question that was asked after `since`, in seconds since
        the epoch. It may take `ASK_S`.
        """
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            max_age_s = ASK_S if since is None else time.time() - since
            if (found := self.news(job_ids, run, max_age_s, since or 0.0)) is not None:
                return found
            time.sleep(WAIT_S)
        return self._scheduler.status(job_ids, run)

    def news(
        self, job_ids: Sequence[str], run: Run, max_age_s: float, since: float = 0.0
    ) -> dict[str, JobStatus] | None:
        """What is known of these jobs, asked for where that is older, or was asked before `since`; None where the
        scheduler may not be asked yet.
        """
        # Without a queue this machine alone is asked. Whoever looks at what others have shared leaves nothing behind.
        if not self._scheduler.has_queue or self._is_of_others():
            return self._scheduler.status(job_ids, run)
        if (known := self._known(job_ids, max_age_s, since)) is not None:
            return known
        with self._only_one() as may_ask:
            if not may_ask or _age_s(self._read()) < ASK_S:  # since the answer: a busy controller takes its time
                return None
            return self._ask(job_ids, run)

    def _ask(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        now = time.time()
        before: dict[str, float] = self._read()["wanted"]
        wanted = {job: at for job, at in before.items() if now - at < WANTED_S} | dict.fromkeys(job_ids, now)
        found = self._scheduler.status(list(wanted), run)
        told = {job: _as_json(status) for job, status in found.items()}
        with suppress(OSError):
            write_json(self._file, {"asked": now, "answered": time.time(), "wanted": wanted, "jobs": told})
        return {job: found[job] for job in job_ids}

    def _known(self, job_ids: Sequence[str], max_age_s: float, since: float) -> dict[str, JobStatus] | None:
        data = self._read()
        if _age_s(data) > max_age_s or data["asked"] < since or not set(job_ids) <= data["jobs"].keys():
            return None
        return {job: _from_json(*data["jobs"][job]) for job in job_ids}

    def _read(self) -> dict[str, Any]:
        """Nothing is known where there is no such file, or one that nobody can read."""
        with suppress(OSError, ValueError):
            return read_map(self._file, _SHAPE) or _NOTHING
        return _NOTHING

    @contextmanager
    def _only_one(self) -> Iterator[bool]:
        """Whether this process may ask."""
        try:
            self._set_mark()
        except FileExistsError:
            yield False
            return
        except OSError:
            yield True
            return
        try:
            yield True
        finally:
            self._mark.unlink(missing_ok=True)

    def _is_of_others(self) -> bool:
        return self._root.exists() and not is_own(self._root)

    def _set_mark(self) -> None:
        make_private(self._file.parent)
        with suppress(FileNotFoundError):
            if abs(time.time() - self._mark.stat().st_mtime) > 2 * TIMEOUT_S:
                self._mark.unlink()
        os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


_SHAPE: Shape = {"asked": float, "answered": float, "wanted": dict[str, float], "jobs": dict[str, list[Any]]}
_NOTHING: dict[str, Any] = {"asked": 0.0, "answered": 0.0, "wanted": {}, "jobs": {}}


def _age_s(data: dict[str, Any]) -> float:
    """An answer from the future is an old one: a clock was set back, or another host's is wrong."""
    answered: float = data["answered"]
    return abs(time.time() - answered)


def _as_json(status: JobStatus) -> list[Any]:
    return [status.state.value, status.reason, status.held, status.is_suspended]


def _from_json(state: str, reason: str, held: list[str], is_suspended: bool = False) -> JobStatus:
    return JobStatus(JobState(state), reason, tuple(held), is_suspended)
