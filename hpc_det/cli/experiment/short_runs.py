"""Short experiments of our own, submitted, waited for and taken away again."""

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
from hpc_det.cli.experiment.stop import kill_one as kill
from hpc_det.config.merge import Tree
from hpc_det.config.request import Request
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.process import uninterrupted
from hpc_det.plan.effective import Effective, effective
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.submitting import Unsettled
from hpc_det.view.formatting import one_line
from hpc_det.view.state import ExperimentState
from hpc_det.view.watch import POLL_S, Watch, say


class Wanted(Protocol):
    """What a run shall show."""

    @property
    def title(self) -> str: ...


class Found(Protocol):
    """What a run has shown."""

    @property
    def is_a_result(self) -> bool:
        """Otherwise the experiment stays, for its logs."""

    @property
    def summary(self) -> str:
        """A line."""


W = TypeVar("W", bound=Wanted)
F = TypeVar("F", bound=Found)


@dataclass(frozen=True)
class Ended:
    experiment: ExperimentFolder | None
    """None where it could not be submitted."""
    failure: str | None = None
    """Why it was not completed."""

    @property
    def id(self) -> int | None:
        return None if self.experiment is None else self.experiment.id


Series: TypeAlias = Generator[W, F, None]
"""Runs of which each may depend on what came of the one before."""


@dataclass(frozen=True)
class _Run(Generic[W, F]):
    series: Series[W, F]
    wanted: W
    watch: Watch

    def ended(self) -> Ended | None:
        """None before its end."""
        state = self.watch.state()
        if not state.is_final:
            return None
        if state is ExperimentState.COMPLETED:
            return Ended(self.watch.view.folder)
        return Ended(self.watch.view.folder, f"{state.value}: {self.watch.view.why_not_completed(state)}")


class ShortRuns(Generic[W, F]):
    """Whatever ends the `with` block, nothing of them goes on. Those that failed stay for whoever wants to read their
    logs, and all of them with `keep`.
    """

    def __init__(self, submit: Callable[[W], ExperimentFolder], read: Callable[[W, Ended], F], *, keep: bool) -> None:
        """`submit` raises HpcDetError where an experiment cannot be submitted."""
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
        """In the order of their ends; at most so many of them are submitted at the same time."""
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
                with suppress(StopIteration):
                    waiting.appendleft((one, one.send(result)))
        return found

    @uninterrupted()  # a submitted experiment that nobody knows would never be ended
    def _begin(self, series: Series[W, F], wanted: W) -> list[tuple[Series[W, F], F]]:
        """What has ended by that: the run itself, where it cannot be submitted."""
        try:
            experiment = self._submit(wanted)
        except Unsettled as error:
            say(f"{wanted.title}: {error}")
            raise
        except HpcDetError as error:
            say(f"{wanted.title}: {error}")
            return [(series, self._read(wanted, Ended(None, one_line(str(error)))))]
        say(f"experiment {experiment.id}: {wanted.title}")
        self._under_way.append(_Run(series, wanted, Watch(experiment)))
        return []

    def _kill_all(self) -> None:
        with ThreadPoolExecutor(8) as workers:  # most of it is waiting until the jobs are gone
            list(workers.map(self._kill, [run.watch.view.folder for run in self._under_way]))

    def _kill(self, experiment: ExperimentFolder) -> None:
        try:
            say(kill(experiment))
        except UsageError as ended:  # by itself, a moment ago
            say(str(ended))
        except HpcDetError as error:
            say(f"{error}; end it with `hpc-det experiment kill {experiment.id}`")
            return
        self._to_delete.append(experiment)

    def _ended_now(self) -> list[tuple[Series[W, F], F]]:
        now = [(run, ended) for run in self._under_way if (ended := run.ended())]
        return [(run.series, self._take(run, ended)) for run, ended in now]

    def _take(self, run: _Run[W, F], ended: Ended) -> F:
        self._under_way.remove(run)
        found, experiment = self._read(run.wanted, ended), run.watch.view.folder
        if found.is_a_result:
            self._to_delete.append(experiment)
        logs = "" if found.is_a_result else f"; see more with `hpc-det experiment logs {experiment.id}`"
        say(f"experiment {experiment.id}: {found.summary}{logs}")
        return found


def effective_of(request: Request, config: Tree) -> Effective:
    """Of a short training: the request with a `config` made from its effective one, which has all layers merged."""
    cluster = {key: value for key, value in request.cluster.items() if key != "experiment"}
    return effective(replace(request, cluster=cluster, template=None, template_name=None, config=config, overrides=()))


def once(wanted: W) -> Series[W, F]:
    """A series of one."""
    yield wanted
