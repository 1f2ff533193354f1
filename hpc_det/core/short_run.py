"""Short runs of a loop on the Core API: `--test`, and the trainings that `experiment verify-resume` compares.

A short run ends after a given number of batches, whatever length the loop has: `batches` and `epochs` end, and
`should_stop` returns a stop. The run then counts as finished. With verify-resume it is also stopped at given batches,
and each rank writes a trace (hpc_det.core.resume_trace).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.checkpoint.committed import Committed
from hpc_det.core.fingerprint import texts_of
from hpc_det.core.passes import Passes
from hpc_det.core.progress import Progress
from hpc_det.core.run import Run
from hpc_det.core.state_texts import generators_texts
from hpc_det.core.trace_file import TraceFile, UsersCode
from hpc_det.core.tracked import Tracked
from hpc_det.distributed.preempt import ForcedStop
from hpc_det.node.json_files import append_line, read_lines
from hpc_det.store.attempt import StopRequest, request_stop

if TYPE_CHECKING:
    from hpc_det.core.resume_trace import LoopTrace


class ShortRun:
    """The part of one rank in a short run. All ranks create it together."""

    def __init__(self, run: Run, *, tracked: Tracked, progress: Progress, passes: Passes) -> None:
        """`tracked`, `progress` and `passes` belong to the loop and change as it trains."""
        self._run = run
        self._progress = progress
        self._passes = passes
        self._length = 1 if run.purpose.test else _length(run.spec["config"])
        self._uses_batches = False
        """Whether the loop has used `batches` in this attempt."""
        stops = run.purpose.forced_stops or frozenset()
        made = run.distributed.broadcast_json(_stops_made(run) if run.distributed.is_chief else None)
        self._stops = sorted(stop for stop in stops if stop > max(made, default=0))
        """Numbers of batches after which to stop, without those of former attempts."""
        if stops and run.attempt > 1 and run.distributed.is_chief:
            append_line(run.folder.resume_stops, {"resumed": progress.steps})
        self._trace = None if run.purpose.forced_stops is None else _trace(run, tracked, progress.steps)

    @property
    def is_over(self) -> bool:
        """Whether the run has its length."""
        return self._length is not None and self._progress.steps >= self._length

    def searcher(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the section `searcher` of a configuration for a run of this length."""
        return config if self._length is None else {**config, "max_length": {"batches": self._length}}

    def batches(self, loader: Iterable[Any], batches: Iterator[Any], accumulate: int) -> Iterator[Any]:
        """Yield the batches of a pass over `loader` up to the length of the run, as whole steps of `accumulate`."""
        self._uses_batches = True
        while not (self.is_over and self._passes.done % accumulate == 0):
            number = self._progress.steps
            before = self._trace.before_batch(loader) if self._trace else None
            try:
                batch = next(batches)
            except StopIteration:
                return
            data = texts_of("", batch) if self._trace else {}  # now, since the loop may change it
            if before and self._passes.reads_ahead:  # only now the generators are as without a resume
                before["state"] |= generators_texts()
            self._stop_after(number + 1)
            try:
                yield batch
            finally:  # also if the loop leaves the pass here
                if self._trace and before:
                    self._trace.batch(number, before, data)

    def called(self) -> None:
        """Take note that a loop asks whether to stop. Collective: the step of rank 0 counts for all."""
        if self._uses_batches:
            return
        steps = self._run.distributed.broadcast_json(self._progress.steps)
        self._progress.steps = max(self._progress.steps, steps)
        if self._trace:
            self._trace.step(steps)
        self._stop_after(steps)

    def reported(self, group: str, metrics: Mapping[str, Any]) -> None:
        """Take note of metrics that this rank reports."""
        if self._trace:
            self._trace.reported(group, metrics)

    def stop_request(self) -> StopRequest | None:
        """Write and return the stop request of a forced stop, on rank 0; None if the stop has another reason."""
        run = self._run
        if not (isinstance(run.stop, ForcedStop) and run.stop.is_forced):
            return None
        append_line(run.folder.resume_stops, {"batch": self._progress.steps})
        return request_stop(run.folder.stop, attempt=run.attempt, reason="resume check", source="verify-resume")

    def end(self, newest: Committed | None) -> None:
        """Record the end of a finished training. `newest`: the last checkpoint of this attempt, on rank 0."""
        if self._trace:
            self._trace.end(self._progress.steps, newest)

    # --- helpers

    def _stop_after(self, steps: int) -> None:
        """Stop at the next tick if a stop is due after so many batches."""
        if self._stops and steps >= self._stops[0]:
            assert isinstance(self._run.stop, ForcedStop)
            self._run.stop.force()


def _length(config: Mapping[str, Any]) -> int | None:
    """Return the length in batches of a training for verify-resume; None if its configuration has another unit."""
    length = (config.get("searcher") or {}).get("max_length")
    return length.get("batches") if isinstance(length, Mapping) else length


def _trace(run: Run, tracked: Tracked, resumed: int) -> LoopTrace:
    from hpc_det.core.resume_trace import LoopTrace  # not imported in other runs

    code = (run.job and run.job.code) or Path(sys.argv[0]).parent
    file = TraceFile(run.folder, run.distributed.rank, run.attempt)
    return LoopTrace(file, tracked, UsersCode(code, "__main__"), resumed)


def _stops_made(run: Run) -> list[int]:
    """Return the numbers of batches after which former attempts were stopped."""
    return [line["batch"] for line in read_lines(run.folder.resume_stops) if "batch" in line]
