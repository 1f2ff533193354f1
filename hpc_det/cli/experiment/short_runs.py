"""Short experiments that a command submits to test something, waits for, and deletes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, Protocol, TypeAlias, TypeVar

from hpc_det.cli.experiment.delete import delete_one
from hpc_det.client.stopping import kill_one as kill
from hpc_det.config.merge import Tree
from hpc_det.config.request import Request
from hpc_det.errors import HpcDetError, UsageError, say
from hpc_det.node.process import uninterrupted
from hpc_det.plan.effective import Effective, effective
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.submitting import Unsettled
from hpc_det.view.formatting import one_line
from hpc_det.view.state import ExperimentState
from hpc_det.view.watch import POLL_S, Watch


class Wanted(Protocol):
    """The purpose of a run: what the command tests with it."""

    @property
    def title(self) -> str: ...


class Found(Protocol):
    """The result of a run."""

    @property
    def is_a_result(self) -> bool:
        """Return whether the run succeeded; otherwise its experiment is kept for its logs."""

    @property
    def summary(self) -> str:
        """The result in one line."""


W = TypeVar("W", bound=Wanted)
F = TypeVar("F", bound=Found)


@dataclass(frozen=True)
class Ended:
    """The end of a run."""

    experiment: ExperimentFolder | None
    """The run's experiment; None if it could not be submitted."""
    failure: str | None = None
    """Why the run failed; None if it is COMPLETED."""

    @property
    def id(self) -> int | None:
        return None if self.experiment is None else self.experiment.id


Series: TypeAlias = Generator[W, F, None]
"""Runs in sequence: the generator yields the purpose of a run and receives its result before it yields the next."""


@dataclass(frozen=True)
class _Run(Generic[W, F]):
    """A run that has been submitted."""

    series: Series[W, F]
    wanted: W
    watch: Watch

    def ended(self) -> Ended | None:
        """Return the run's end, or None while it is under way."""
        state = self.watch.state()
        if not state.is_final:
            return None
        if state is ExperimentState.COMPLETED:
            return Ended(self.watch.view.folder)
        return Ended(self.watch.view.folder, f"{state.value}: {self.watch.view.why_not_completed(state)}")


class ShortRuns(Generic[W, F]):
    """Short experiments that are killed and deleted at the end of the `with` block, even after an exception.

    Experiments that failed are not deleted, since the user may want to read their logs. With `keep`, none is deleted.
    """

    def __init__(self, submit: Callable[[W], ExperimentFolder], read: Callable[[W, Ended], F], *, keep: bool) -> None:
        """Create runs; `submit` must raise HpcDetError if an experiment cannot be submitted."""
        self._submit = submit
        self._read = read
        self._keep = keep
        self._under_way: list[_Run[W, F]] = []
        self._to_delete: list[ExperimentFolder] = []

    def __enter__(self) -> ShortRuns[W, F]:
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

    def run_all(self, series: Iterable[Series[W, F]], *, side_by_side: int) -> list[F]:
        """Run all series, at most `side_by_side` runs at a time; return the results in the order of their ends."""
        found: list[F] = []
        waiting = deque((one, first) for one in series if (first := next(one, None)))
        while waiting or self._under_way:
            if waiting and len(self._under_way) < side_by_side:
                ended = self._begin(*waiting.popleft())
            else:
                time.sleep(POLL_S)
                ended = self._ended_now()
            for one, result in ended:
                found.append(result)
                with suppress(StopIteration):  # the series has ended
                    # in front: a series that has begun is continued before another one begins
                    waiting.appendleft((one, one.send(result)))
        return found

    @uninterrupted()  # a Ctrl-C between submission and `append` would leave an experiment that is never killed
    def _begin(self, series: Series[W, F], wanted: W) -> list[tuple[Series[W, F], F]]:
        """Submit a run; return nothing, or the run's result if it cannot be submitted."""
        try:
            experiment = self._submit(wanted)
        except Unsettled as error:  # jobs may be queued, so the run has not simply failed
            say(f"{wanted.title}: {error}")
            raise
        except HpcDetError as error:
            say(f"{wanted.title}: {error}")
            return [(series, self._read(wanted, Ended(None, one_line(str(error)))))]
        say(f"experiment {experiment.id}: {wanted.title}")
        self._under_way.append(_Run(series, wanted, Watch(experiment)))
        return []

    def _kill_all(self) -> None:
        with ThreadPoolExecutor(8) as workers:  # most of the time is spent waiting for the jobs to end
            list(workers.map(self._kill, [run.watch.view.folder for run in self._under_way]))

    def _kill(self, experiment: ExperimentFolder) -> None:
        try:
            say(kill(experiment))
        except UsageError as ended:  # it ended normally a moment ago
            say(str(ended))
        except HpcDetError as error:
            say(f"{error}; end it with `hpc-det experiment kill {experiment.id}`")
            return
        self._to_delete.append(experiment)

    def _ended_now(self) -> list[tuple[Series[W, F], F]]:
        """Return the series and the result of each run that has ended since the last call."""
        now = [(run, ended) for run in self._under_way if (ended := run.ended())]
        return [(run.series, self._take(run, ended)) for run, ended in now]

    def _take(self, run: _Run[W, F], ended: Ended) -> F:
        """Read and report the result of a run that has ended."""
        self._under_way.remove(run)
        found, experiment = self._read(run.wanted, ended), run.watch.view.folder
        if found.is_a_result:
            self._to_delete.append(experiment)
        logs = "" if found.is_a_result else f"; see more with `hpc-det experiment logs {experiment.id}`"
        say(f"experiment {experiment.id}: {found.summary}{logs}")
        return found


def effective_of(request: Request, config: Tree) -> Effective:
    """Return the effective configuration of a short training, given its `config`; `request` has the profile of the
    experiment's own effective configuration.
    """
    # `config` was made from an effective configuration, in which template and overrides are already merged
    return effective(replace(request, template=None, template_name=None, config=config, overrides=()))


def once(wanted: W) -> Series[W, F]:
    """Return a series of one run."""
    yield wanted
