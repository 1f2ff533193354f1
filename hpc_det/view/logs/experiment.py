"""The logs of all trials of an experiment, and what its jobs print outside of trials."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import chain
from operator import attrgetter

from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.log_lines import OF_WORKER
from hpc_det.view.logs.log_file import LogFile
from hpc_det.view.logs.passage import Passage, Source, last
from hpc_det.view.logs.trial import TrialLogs
from hpc_det.view.logs.wanted import Selection, Wanted
from hpc_det.view.state import ExperimentView


class ExperimentLogs:
    """Each call goes on where the last one ended."""

    def __init__(self, view: ExperimentView, wanted: Wanted) -> None:
        """`view`: somebody else looks whether there are new trials."""
        self._view = view
        self._wanted = wanted
        self._jobs = JobsLogs(view.folder, wanted)
        self._trials: dict[int, TrialLogs] = {}

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Those since the last call: the jobs', then trial after trial. `final`: also last lines without an end."""
        trials = (logs.passages(final=final) for logs in self._logs(final))
        return chain(self._jobs.passages(final=final), chain.from_iterable(trials))

    def last(self, count: int, *, final: bool = False) -> list[Passage]:
        """The last `count` lines of all trials, merged by time."""
        jobs = self._jobs.passages(final=final)
        trials = [logs.last(count, final=final) for logs in self._logs(final)]
        return last(chain(jobs, merge(*trials, key=attrgetter("time"))), count)

    def _logs(self, final: bool) -> Iterator[TrialLogs]:
        for number in sorted(self._view.search.trials if final else self._active()):
            folder = self._view.folder.trial(number)
            yield self._trials.setdefault(number, TrialLogs(folder, self._wanted))

    def _active(self) -> set[int]:
        """The trials that may print now, or were never read. The last words of others wait for the end."""
        search = self._view.search
        open_now = {work.trial for work in search.open.values()}
        return open_now | set(search.last_trial.values()) | (search.trials.keys() - self._trials.keys())


class JobsLogs:
    """Modules and setup of the site, errors before any trial began.

    Not the lines of workers: which trial one takes is known from the trial's own log.
    """

    def __init__(self, experiment: ExperimentFolder, wanted: Wanted) -> None:
        """None are of a single rank."""
        self._folder = experiment.jobs if wanted.rank is None else None
        self._selection = Selection(wanted)
        self._files: dict[str, LogFile] = {}

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        return self._selection.of(self._outside_of_trials(final))

    def _outside_of_trials(self, final: bool) -> Iterator[Passage]:
        paths = self._folder.glob("*.log") if self._folder else ()
        for path in sorted(paths, key=lambda path: [*map(int, path.stem.split("-"))]):
            file = self._files.setdefault(path.stem, LogFile(path, Source(job=path.stem)))
            for passage in file.passages(final=final):
                if lines := [line for line in passage.lines if not OF_WORKER.match(line)]:
                    yield passage._replace(lines=lines)
