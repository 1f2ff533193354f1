"""A search whose workers are killed at random times: no decision is lost, and no two workers do the same work."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Work
from hpc_det.search.state import SearchState
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.shared_log import SharedLog
from tests.search.experiments import experiment
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

WORKERS, TRIALS, KILLS = 32, 64, 150
ADAPTIVE = {"name": "adaptive_asha", "max_trials": TRIALS, "mode": "standard", "max_rungs": 5}
FORK = multiprocessing.get_context("fork")


class Claims:
    """Files that record the worker that does a work now, and the works that are done, independently of the search."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def take(self, work: Work, worker: int) -> None:
        try:
            descriptor = os.open(self._path(work, "doing"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(descriptor, f"{worker}".encode())
            os.close(descriptor)
        except FileExistsError:
            # Empty: this worker was killed while it wrote its claim, or another worker is writing one now.
            if (self._path(work, "doing").read_text() or f"{worker}") != f"{worker}":
                self._path(work, f"also-done-by-{worker}").touch()

    def done(self, work: Work) -> None:
        self._path(work, "part").touch()
        self._path(work, "part").replace(self._path(work, "done"))

    def drop(self, work: Work) -> None:
        """Remove the claim of a worker that does not come back."""
        self._path(work, "doing").unlink(missing_ok=True)

    def names(self, suffix: str) -> set[str]:
        return {path.name for path in self.folder.glob(f"*.{suffix}*")}

    def _path(self, work: Work, suffix: str) -> Path:
        return self.folder / f"{work.trial}-{work.until}.{suffix}"


def loss(folder: ExperimentFolder, work: Work) -> float:
    """Return the loss: lowest for the learning rate closest to 0.01, and lower for a longer training."""
    assert work.until is not None
    lr: float = SearchJournal(folder).sample(work.trial).hparams["lr"]
    return abs(lr - 0.01) / 10 + 1 / work.until


def works(folder: ExperimentFolder, number: int, job: str, claims: Claims) -> None:
    """Run a worker whose training only writes files."""
    search = SearchJournal(folder)
    work = search.ask(number, job)
    while work is not None:
        claims.take(work, number)
        time.sleep(random.Random(f"{work}").uniform(0, 0.4))
        claims.done(work)
        work = search.report(number, work, loss(folder, work))
    search.leave(number)


class Team:
    """All workers as processes; a killed worker is replaced under the same number."""

    def __init__(self, folder: ExperimentFolder, claims: Claims) -> None:
        self._folder = folder
        self._claims = claims
        self._starts: Counter[int] = Counter()
        self.search = SearchJournal(folder)
        self.processes = {number: self._start(number) for number in range(WORKERS)}

    def kill(self, number: int, *, for_good: bool) -> None:
        """Kill a worker and start another one. `for_good`: report the job as lost, so that the next one is a new
        worker.
        """
        self.processes[number].kill()
        self.processes[number].join()
        if for_good:
            if work := self.search.state().open.get(number):
                self._claims.drop(work)
            self.search.lose(number, self._job(number))
        self.processes[number] = self._start(number)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def _start(self, number: int) -> BaseProcess:
        self._starts[number] += 1
        process = FORK.Process(target=works, args=(self._folder, number, self._job(number), self._claims))
        process.start()
        return process

    def _job(self, number: int) -> str:
        return f"{number}-{self._starts[number]}"


def replay(folder: ExperimentFolder) -> tuple[SearchState, list[tuple[int, Work]]]:
    """Return the state that follows from the journal, and every work that was given, with its worker, in order."""
    state, given = SearchJournal(experiment(folder.path / "replay", **LENGTH, **ADAPTIVE)).state(), []
    for entry in SharedLog(folder.search).new():
        before = dict(state.open)
        state.apply(entry)
        given += [(worker, work) for worker, work in state.open.items() if before.get(worker) != work]
    return state, given


LENGTH = {"max_length": {"batches": 256}}


@pytest.mark.long
def test_32_workers_killed_at_random_lose_no_decision_and_do_no_work_twice(tmp_path: Path) -> None:
    """Run searches until there were enough kills: the kills per search depend on the speed of the machine."""
    generator, kills, searches = random.Random(5), 0, 0
    while kills <= KILLS / 2:
        searches += 1
        assert searches <= KILLS, "every search was over too soon to show anything"
        kills += one_stormy_search(tmp_path / f"{searches}", generator)


def one_stormy_search(tmp_path: Path, generator: random.Random) -> int:
    """Return the number of workers that were killed during the search."""
    folder = experiment(tmp_path / "experiment", **LENGTH, **ADAPTIVE)
    claims = Claims(tmp_path / "claims")
    team, kills = Team(folder, claims), 0
    try:
        for _ in range(KILLS):
            alive = [number for number, process in team.processes.items() if process.is_alive()]
            if not alive:
                break
            team.kill(generator.choice(alive), for_good=generator.random() < 0.3)
            kills += 1
            time.sleep(generator.uniform(0, 0.03))  # so that a kill may come at any point
        for process in team.processes.values():
            process.join(timeout=DEADLINE_S)
            assert process.exitcode == 0
    finally:
        team.close()
    state, given = replay(folder)
    shared = SearchJournal(folder).state()
    assert state.finished
    assert (state.trials, state.open, state.present) == (shared.trials, {}, {})
    assert sorted(state.trials) == list(range(1, TRIALS + 1))
    reported = {f"{work.trial}-{work.until}.done" for _, work in given}
    assert claims.names("done") == reported
    assert claims.names("also") == set()
    for trial, its in state.trials.items():
        assert its.length is not None
        assert its.value == loss(folder, Work(trial, its.length)), "the report that counts is the one of its last work"
    best = min(state.trials, key=lambda trial: state.trials[trial].value or 0.0)
    assert state.trials[best].length == 256, "the best one was trained to the end"
    return kills
