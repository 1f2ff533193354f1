"""A cache of the scheduler's answers about jobs, shared by all processes that use one state root.

All users of a site share one controller, so processes that poll use this cache: one process queries the scheduler and
the others read its answer. The file is replaced as a whole. While a process queries, a lock file exists; a lock file
that a killed process left behind expires. If the folder cannot be used, every process queries the scheduler directly.
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
"""Minimum seconds between two queries."""
WANTED_S = 120.0
"""Seconds after the last request for a job until queries leave the job out."""
WAIT_S = 0.05
"""Seconds between two reads of the file while another process queries."""
PATIENCE_S = 10.0
"""Seconds to wait for the query of another process before querying directly."""


class SharedAnswers:
    """The cached answers of one scheduler below one state root."""

    def __init__(self, root: Path, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._root = root
        self._file = root / ".scheduler" / f"{type(scheduler).__name__.lower()}.json"
        self._mark = self._file.with_suffix(".asking")

    def status(self, job_ids: Sequence[str], run: Run, *, since: float | None = None) -> dict[str, JobStatus]:
        """Return the status of these jobs, no older than `ASK_S`, or from a query that began after `since`.

        `since` is in seconds since the epoch. May block for up to `PATIENCE_S` and one query.
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
        """Return the status of these jobs, or None if this process may not query the scheduler yet.

        The cached answer is used if it is no older than `max_age_s` and its query began at `since` or later. Otherwise
        this process queries the scheduler, unless another one does so now or got an answer less than `ASK_S` ago.
        """
        # The local machine answers without a query. Below another user's state root nothing may be written.
        if not self._scheduler.has_queue or self._is_of_others():
            return self._scheduler.status(job_ids, run)
        if (known := self._known(job_ids, max_age_s, since)) is not None:
            return known
        with self._only_one() as may_ask:
            if not may_ask or _age_s(self._read()) < ASK_S:  # measured from the answer: a busy controller is slow
                return None
            return self._ask(job_ids, run)

    def _ask(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        """Query the scheduler for these jobs and for those requested within WANTED_S, and save the answer."""
        now = time.time()
        before: dict[str, float] = self._read()["wanted"]
        wanted = {job: at for job, at in before.items() if now - at < WANTED_S} | dict.fromkeys(job_ids, now)
        found = self._scheduler.status(list(wanted), run)
        jobs = {job: _as_json(status) for job, status in found.items()}
        with suppress(OSError):
            write_json(self._file, {"asked": now, "answered": time.time(), "wanted": wanted, "jobs": jobs})
        return {job: found[job] for job in job_ids}

    def _known(self, job_ids: Sequence[str], max_age_s: float, since: float) -> dict[str, JobStatus] | None:
        """Return the cached status of these jobs; None if the answer is too old or does not contain all of them."""
        data = self._read()
        if _age_s(data) > max_age_s or data["asked"] < since or not set(job_ids) <= data["jobs"].keys():
            return None
        return {job: _from_json(*data["jobs"][job]) for job in job_ids}

    def _read(self) -> dict[str, Any]:
        """Return the content of the file; an empty answer if it does not exist or cannot be read."""
        with suppress(OSError, ValueError):
            return read_map(self._file, _SHAPE) or _NOTHING
        return _NOTHING

    @contextmanager
    def _only_one(self) -> Iterator[bool]:
        """Hold the lock file in this block. Yields whether this process may query the scheduler."""
        try:
            self._set_mark()
        except FileExistsError:
            yield False
            return
        # The folder cannot be used (read-only, no quota): query without a lock.
        except OSError:
            yield True
            return
        try:
            yield True
        finally:
            self._mark.unlink(missing_ok=True)

    def _is_of_others(self) -> bool:
        """Return whether the state root belongs to another user."""
        return self._root.exists() and not is_own(self._root)

    def _set_mark(self) -> None:
        """Create the lock file. Raises FileExistsError if another process holds it, and another OSError if the folder
        is unusable.
        """
        make_private(self._file.parent)
        with suppress(FileNotFoundError):
            # No query takes this long, so the process that created the file was killed.
            if abs(time.time() - self._mark.stat().st_mtime) > 2 * TIMEOUT_S:
                self._mark.unlink()
        os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


_SHAPE: Shape = {"asked": float, "answered": float, "wanted": dict[str, float], "jobs": dict[str, list[Any]]}
_NOTHING: dict[str, Any] = {"asked": 0.0, "answered": 0.0, "wanted": {}, "jobs": {}}


def _age_s(data: dict[str, Any]) -> float:
    """Return the age of an answer in seconds."""
    answered: float = data["answered"]
    # abs: an answer from the future counts as old, because a clock was set back or the clock of another host is wrong.
    return abs(time.time() - answered)


def _as_json(status: JobStatus) -> list[Any]:
    return [status.state.value, status.reason, status.held, status.is_suspended]


def _from_json(state: str, reason: str, held: list[str], is_suspended: bool = False) -> JobStatus:
    return JobStatus(JobState(state), reason, tuple(held), is_suspended)
