"""Short experiments of our own, submitted, waited for and taken away again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from hpc_det.cli.control import kill
from hpc_det.cli.delete import delete_one
from hpc_det.cli.values import number
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import samples_per_second
from hpc_det.throughput.measurement import Measured, Measurement
from hpc_det.view.state import ExperimentState
from hpc_det.view.story import one_line
from hpc_det.view.watch import POLL_S, Watch, say

Series: TypeAlias = Generator[Measurement, Measured, None]
"""Measurements of which each may depend on what came of the one before."""
Ended: TypeAlias = tuple[Series, Measured]
Submit: TypeAlias = Callable[[Measurement], ExperimentFolder]


@dataclass(frozen=True)
class Run:
    series: Series
    measurement: Measurement
    watch: Watch

    @property
    def experiment(self) -> ExperimentFolder:
        return self.watch.view.folder

    def measured(self) -> Measured | None:
        """None before its end."""
        state = self.watch.state()
        return self._result(state) if state.is_final else None

    def _result(self, state: ExperimentState) -> Measured:
        if state is not ExperimentState.COMPLETED:
            return self._failed(f"{state.value}: {self.watch.view.why_not_completed(state)}")
        reports = samples_per_second(self.experiment.trial().metrics)
        if len(reports) < 2:
            return self._failed("no throughput was reported; only trials and the Trainer of hpc_det.pytorch do that")
        return Measured.of_reports(self.measurement, reports, self.experiment.id)

    def _failed(self, why: str) -> Measured:
        return Measured(measurement=self.measurement, samples_per_s=None, failure=why, experiment=self.experiment.id)


class ShortRuns:
    """Whatever ends the `with` block, nothing of them goes on. Those that failed stay for whoever wants to read their
    logs, and all of them with `keep`.
    """

    def __init__(self, submit: Submit, *, keep: bool) -> None:
        """`submit` raises HpcDetError where an experiment cannot be submitted."""
        self._submit = submit
        self._keep = keep
        self._under_way: list[Run] = []
        self._to_delete: list[ExperimentFolder] = []

    def __enter__(self) -> ShortRuns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill_all()
        for experiment in [] if self._keep else self._to_delete:
            try:
                delete_one(experiment)
            except (HpcDetError, OSError) as problem:
                say(f"note: experiment {experiment.id} was not deleted: {problem}")

    def measure_all(self, series: Iterable[Series], *, side_by_side: int) -> list[Measured]:
        """In the order of their ends; at most so many of them are submitted at the same time."""
        found: list[Measured] = []
        waiting = deque((one, first) for one in series if (first := next(one, None)))
        while waiting or self._under_way:
            if waiting and len(self._under_way) < side_by_side:
                ended = self._begin(*waiting.popleft())
            else:
                time.sleep(POLL_S)
                ended = self._ended_now()
            for one, measured in ended:
                found.append(measured)
                with suppress(StopIteration):
                    waiting.appendleft((one, one.send(measured)))
        return found

    def _begin(self, series: Series, measurement: Measurement) -> list[Ended]:
        """What has ended by that: the measurement itself, where it cannot be submitted."""
        try:
            experiment = self._submit(measurement)
        except HpcDetError as error:
            say(f"{measurement.title}: {error}")
            return [(series, Measured(measurement=measurement, samples_per_s=None, failure=one_line(str(error))))]
        say(f"experiment {experiment.id}: {measurement.title}")
        self._under_way.append(Run(series, measurement, Watch(experiment)))
        return []

    def _kill_all(self) -> None:
        with ThreadPoolExecutor(8) as workers:  # most of it is waiting until the jobs are gone
            list(workers.map(self._kill, [run.experiment for run in self._under_way]))

    def _kill(self, experiment: ExperimentFolder) -> None:
        try:
            say(kill(experiment))
        except UsageError as ended:  # by itself, a moment ago
            say(str(ended))
        except HpcDetError as error:
            say(f"{error}; end it with `hpc-det experiment kill {experiment.id}`")
            return
        self._to_delete.append(experiment)

    def _ended_now(self) -> list[Ended]:
        ended = [(run, measured) for run in self._under_way if (measured := run.measured())]
        for run, measured in ended:
            self._under_way.remove(run)
            if measured.is_a_result:
                self._to_delete.append(run.experiment)
            say(f"experiment {run.experiment.id}: {in_words(measured)}{_logs_of(measured)}")
        return [(run.series, measured) for run, measured in ended]


def in_words(measured: Measured) -> str:
    """What came of it."""
    if measured.samples_per_s is not None:
        return f"{number(measured.samples_per_s)} samples/s"
    return "out of memory" if measured.is_out_of_memory else measured.failure or ""


def _logs_of(measured: Measured) -> str:
    return "" if measured.is_a_result else f"; see more with `hpc-det experiment logs {measured.experiment}`"


def once(measurement: Measurement) -> Series:
    """A series of one."""
    yield measurement
