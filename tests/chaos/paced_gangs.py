"""Gangs that train as far as a test permits: the story of the end-to-end tests, and a driver with two nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from hpc_det.node.files import write_atomic
from hpc_det.node.json_files import read_json
from hpc_det.node.process import descendants, has_no_memory
from hpc_det.sgd.elastic.meeting import announced
from hpc_det.store.journal import Journal
from hpc_det.store.run_folder import RunFolder
from tests.e2e.story import HERE, Story
from tests.listening import listening
from tests.processes import pids, programs, words
from tests.wait import DEADLINE_S, wait_for

TRIAL = "paced:PacedTrial"
ON_TWO_SLOTS = ("searcher.max_length.batches=60", "resources.slots_per_trial=2")
PACED = Path(__file__).with_name("paced")
WITHOUT_END = 1_000_000


class Gang(Protocol):
    @property
    def pids(self) -> list[int]:
        """All its processes except those of Slurm: giant lengths end `srun` (docs/explanation/security.md)."""

    @property
    def with_a_store(self) -> Sequence[int]:
        """The processes that hold a PyTorch store."""

    @property
    def life(self) -> object:
        """A value that differs after each restart."""

    def ports(self, listener: str) -> set[int]:
        """Return the ports on which this listener of the gang must listen, whether or not it does."""

    def train(self, steps: int) -> None:
        """Train this many more batches or epochs."""

    def stop(self) -> None:
        """Stop as the scheduler does: the gang saves, exits and resumes."""

    def finish(self) -> None:
        """Let the gang end, and compare it with an undisturbed gang."""

    def log(self) -> str:
        """Return the end of the output of its processes."""


class PacedStory:
    """An experiment whose ranks run. `stop`: stops it as its scheduler does."""

    def __init__(self, story: Story, pace: Path, stop: Callable[[PacedStory], object], undisturbed: Story) -> None:
        self.story = story
        self._pace = pace
        self._allowed = 0
        self._stop = stop
        self._undisturbed = undisturbed

    @classmethod
    def begin(
        cls,
        *overrides: str,
        folder: Path,
        variables: Mapping[str, str],
        stop: Callable[[PacedStory], object],
        undisturbed: Story,
        cluster: str = "local",
    ) -> PacedStory:
        """Start the experiment. `variables`: for its processes, including those of `pace_in(folder)`; on a lab, the
        profile exports them.
        """
        code = folder / "code"
        shutil.copytree(HERE / "trial", code, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PACED / "paced.py", code)
        (pace := folder / "pace").write_text("0")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items() if cluster == "local" else ():
                patch.setenv(name, value)
            story = Story.begin(*ON_TWO_SLOTS, *overrides, cluster=cluster, context=code)
        begun = cls(story, pace, stop, undisturbed)
        begun.train(1)
        return begun

    def train(self, steps: int) -> None:
        self._allowed = max(self._allowed, self.story.batches_reported) + steps
        write_atomic(self._pace, str(self._allowed))
        self.story.until_batch(self._allowed)

    def stop(self) -> None:
        self._stop(self)
        self.story.until_ended(1)
        assert self.story.causes == ["preempted"]
        self.train(1)

    def finish(self) -> None:
        write_atomic(self._pace, str(WITHOUT_END))
        self.story.wait()
        assert self.story.causes == ["preempted", "finished"]
        assert self.story.same_as(self._undisturbed)

    @property
    def life(self) -> object:
        return Journal(self.story.trial.journal).last_attempt(), self._ranks

    def log(self) -> str:
        ranks = sorted(self.story.trial.path.glob("logs/*/rank-*.log"))
        return "\n".join([self.story.logged, *(rank.read_text(errors="replace")[-3000:] for rank in ranks)])

    @property
    def pids(self) -> list[int]:
        folder = str(self.story.trial.experiment().path)
        found = [pid for pid in pids() if _is_in(pid, folder)]
        return sorted(pid for pid in {*found, *self._ranks} if words(pid, "comm") != ["srun\n"])

    @property
    def with_a_store(self) -> list[int]:
        return [pid for pid in self.pids if self._store_port in [each.port for each in listening(pid)]]

    @property
    def _store_port(self) -> int:
        return int(self._meeting.get("port", 0))

    @property
    def _meeting(self) -> dict[str, Any]:
        return read_json(self.story.trial.rendezvous(Journal(self.story.trial.journal).last_attempt())) or {}

    def ports(self, listener: str) -> set[int]:
        match listener:
            case "rank 0":
                return {each.port for each in listening(self.story.rank_pid(0))}
            case "torchrun":
                return {each.port for pid in self._running("torch.distributed.run") for each in listening(pid)}
            case "agent of node 0":
                return {self._meeting["agents_port"]}
            case "store":
                return {self._store_port}
        raise ValueError(listener)

    @property
    def agents(self) -> list[int]:
        return self._running("hpc_det.launch.agent")

    def _running(self, module: str) -> list[int]:
        return sorted({*self.pids} & {*programs(module)})

    @property
    def _ranks(self) -> list[int]:
        try:
            return [self.story.rank_pid(rank) for rank in range(2)]
        except ValueError:
            pytest.fail(f"a rank has ended\n{self.log()}")


def terminate(gang: PacedStory) -> None:
    os.kill(gang.agents[0], signal.SIGTERM)


def pace_in(folder: Path) -> dict[str, str]:
    return {"CHAOS_PACE": str(folder / "pace")}


def _is_in(pid: int, folder: str) -> bool:
    return any(folder in word for file in ("cmdline", "environ") for word in words(pid, file))


DRIVER = """
import sys, time
from pathlib import Path
from hpc_det.sgd import TorchTrainer
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.trained import Linear, weights

folder = Path(sys.argv[1])
if __name__ == "__main__":
    nodes = LocalNodes(2)
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=nodes, run=folder / "run") as trainer:
        for epoch in trainer.remaining(int(sys.argv[2])):
            while epoch >= int((folder / "pace").read_text()):
                time.sleep(0.005)
            loss = trainer.train()["train_loss"]
            with (folder / "losses").open("a") as file:
                file.write(f"{epoch} {float(loss).hex()}\\n")
        shown = {name: value.tolist() for name, value in weights(trainer).items()}
        (folder / "weights").write_text(str(shown))
"""
EPOCHS = 30


class PacedDriver:
    """A TorchTrainer with one rank on each of two nodes."""

    def __init__(self, folder: Path, variables: Mapping[str, str], undisturbed: Path, epochs: int = EPOCHS) -> None:
        """`undisturbed`: the folder of a finished driver."""
        (folder / "pace").write_text("0")
        self.folder = folder
        self._run = RunFolder(folder / "run")
        self._environment = {**os.environ, **variables}
        self._undisturbed = undisturbed
        self._epochs = epochs
        self._driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        (script := self.folder / "driver.py").write_text(DRIVER)
        command = [sys.executable, str(script), str(self.folder), str(self._epochs)]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    @property
    def pids(self) -> list[int]:
        return [self._driver.pid, *descendants(self._driver.pid)]

    @property
    def with_a_store(self) -> Sequence[int]:
        return []

    @property
    def life(self) -> object:
        """The driver's process, and the generations of its ranks."""
        assert self._driver.poll() is None, self.log()
        return self._driver.pid, sorted(self._run.logs.glob("attempt-*"))

    def ports(self, listener: str) -> set[int]:
        assert listener == "driver"
        wait_for(lambda: announced(self._run), DEADLINE_S, self.log)
        driver = announced(self._run)
        assert driver
        return {driver.port}

    def train(self, steps: int) -> None:
        allowed = len(self.losses) + steps
        write_atomic(self.folder / "pace", str(allowed))
        wait_for(lambda: len(self.losses) >= allowed, DEADLINE_S, self.log)

    def stop(self) -> None:
        before = self.pids
        self._driver.send_signal(signal.SIGTERM)
        assert self._driver.wait(DEADLINE_S) == -signal.SIGTERM, self.log()
        wait_for(lambda: all(map(has_no_memory, before)), DEADLINE_S)  # the state that its agents held is on disk then
        self._driver = self._start()
        self.train(1)

    def finish(self) -> None:
        self.let_run()
        assert self.losses == (self._undisturbed / "losses").read_text().splitlines()
        assert (self.folder / "weights").read_text() == (self._undisturbed / "weights").read_text()

    def let_run(self) -> None:
        write_atomic(self.folder / "pace", str(WITHOUT_END))
        assert self._driver.wait(DEADLINE_S) == 0, self.log()

    @property
    def losses(self) -> list[str]:
        """The losses by epoch. An epoch that a stop interrupts is repeated, and writes the same line again."""
        path = self.folder / "losses"
        return list(dict.fromkeys(path.read_text().splitlines())) if path.exists() else []

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")
