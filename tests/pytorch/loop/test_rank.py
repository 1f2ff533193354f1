"""A rank as a real process; the test is the agent at the other end of its connection."""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.json_files import read_json, write_json
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import Attempt, Failure, first_failure
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import read_reports
from tests.forked_python import become
from tests.pytorch.trials import CONFIG
from tests.sgd.forked_agents import Forked
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.usefixtures("_fork_server")

CODE = """
import gc, os, signal, time
from tests.pytorch.trials import Tiny

class Raising(Tiny):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 3:
            raise ArithmeticError("in batch 3")
        return super().train_batch(batch, epoch_idx, batch_idx)

class Slow(Tiny):
    def train_batch(self, batch, epoch_idx, batch_idx):
        assert gc.isenabled(), "only the rank's own imports go without"
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return super().train_batch(batch, epoch_idx, batch_idx)

class Unwrapped(Tiny):
    def __init__(self, context):
        super().__init__(context)
        context.models.clear()
        context.optimizers.clear()
"""


class Agent:
    """The part of a node agent that serves one rank."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.experiment = ExperimentFolder(folder)
        self.code, self.trial = self.experiment.code, self.experiment.trial()
        for needed in (self.code, self.trial.checkpoints, self.experiment.search):
            needed.mkdir(parents=True)
        self.events: list[tuple[str, Any]] = []
        self.socket = str(private / "agent")
        self._selector = selectors.DefaultSelector()
        self._ranks = AgentSocket(self.socket, self._selector)
        self._ranks.on_lost = lambda rank: self.events.append(("lost", rank))
        self._ranks.on_failed = lambda: self.events.append(("failed", None))
        self._ranks.on_signal = self._on_heard

    def run(self, trial_name: str, *, fresh: bool = False, **config: Any) -> int:
        """Train a trial on rank 0 of 1 and return its exit code."""
        program, variables = ["-m", "hpc_det.launch.rank", trial_name], {"RANK": "0", "WORLD_SIZE": "1"}
        return self.serve(program, variables, fresh=fresh, **config)

    def serve(
        self, program: list[str], variables: Mapping[str, str], *, ranks: int = 1, fresh: bool = False, **config: Any
    ) -> int:
        """Run Python with these arguments, serve it until it ends, and return its exit code. `ranks`: number of ranks
        of the node.

        `fresh`: do not fork it from a process that has loaded torch.
        """
        spec = {"experiment_id": 1, "trial_id": 1, "trial_seed": 5, "hparams": {"global_batch_size": 4, "workers": 0}}
        write_json(self.trial.trial, {**spec, "config": {**CONFIG, **config}})
        write_json(self.experiment.effective, {**CONFIG, **config})
        assert SearchJournal(self.experiment).ask(0, "4711") is not None
        (self.code / "model_def.py").write_text(CODE)
        attempt = Attempt(
            folder=str(self.trial.path),
            number=1,
            worker=0,
            node_rank=0,
            nodes=1,
            ranks_per_node=ranks,
            address="127.0.0.1",
            master_addr="127.0.0.1",
            master_port=1,
            secret="secret",
            socket=self.socket,
        )
        path = os.pathsep.join([str(self.code), str(Path(__file__).parents[2])])
        environment = {**os.environ, **attempt.to_env(), **variables, "PYTHONPATH": path}
        rank = (_fresh if fresh else _forked)(program, environment, self.code)
        end = time.monotonic() + DEADLINE_S
        try:
            while rank.poll() is None:
                assert time.monotonic() < end, self.log
                self._serve(0.05)
        finally:
            rank.kill()
            code = rank.wait()
        while self._serve(0):  # its last messages, and the end of the connection
            pass
        assert self._ranks.ranks == ({0: rank.pid} if ranks == 1 else {})
        return code

    def close(self) -> None:
        self._ranks.close()
        self._selector.close()

    @property
    def log(self) -> str:
        return self.trial.rank_log(1, 0).read_text()

    @property
    def failure(self) -> Failure:
        failure = first_failure(self.trial, 1)
        assert failure is not None
        return failure

    def _on_heard(self, signal: str) -> None:
        self.events.append(("heard", signal))
        self._ranks.send_stop("signal")

    def _serve(self, timeout: float) -> bool:
        """Handle the available messages and return whether there were any."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            key.data()
        return bool(ready)


def _fresh(program: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *program], env=environment, cwd=folder)


def _forked(program: list[str], environment: dict[str, str], folder: Path) -> Forked:
    its = (program, environment, folder)
    return Forked(multiprocessing.get_context("forkserver").Process(target=become, args=its))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with tempfile.TemporaryDirectory() as private:  # a socket's path must be short
        agent = Agent(tmp_path, Path(private))
        yield agent
        agent.close()


def test_a_rank_that_succeeds_says_so(agent: Agent) -> None:
    assert agent.run("tests.pytorch.trials:Tiny") == 0, agent.log
    assert agent.events == []
    assert read_json(agent.trial.outcome) == {"attempt": 1, "kind": "finished", "steps": 18, "saved": True}
    assert first_failure(agent.trial, 1) is None
    search = SearchJournal(agent.experiment).state()
    last = [record for record in read_reports(agent.trial.metrics) if record["kind"] == "validation"][-1]
    assert last["steps"] == 18
    assert (search.finished, search.trials[1].length, search.trials[1].value) == (True, 3, last["metrics"]["loss"])


def test_a_rank_that_hears_a_signal_stops_when_its_agent_rings(agent: Agent) -> None:
    endless = {"searcher": {**CONFIG["searcher"], "max_length": {"batches": 100_000}}}
    seldom = {"min_validation_period": {"batches": 0}, "min_checkpoint_period": {"batches": 0}}
    assert agent.run("model_def:Slow", fresh=True, **endless, **seldom) == 0, agent.log
    assert agent.events == [("heard", "SIGTERM")]
    outcome = read_json(agent.trial.outcome)
    assert outcome is not None
    assert outcome["kind"] == "stopped"
    assert 3 <= outcome["steps"] < 100_000
    (manifest,) = (json.loads(path.read_text()) for path in agent.trial.checkpoints.glob("*/manifest.json"))
    assert manifest["steps_completed"] == outcome["steps"]


def test_a_rank_that_raises_notes_its_traceback(agent: Agent) -> None:
    assert agent.run("model_def:Raising") == 1
    assert agent.events == [("failed", None)]
    assert (agent.failure.rank, agent.failure.message) == (0, "ArithmeticError: in batch 3")
    assert not agent.failure.user_error
    *_, last = agent.failure.traceback.splitlines()
    assert last == "ArithmeticError: in batch 3"
    assert 'model_def.py", line 8, in train_batch' in agent.failure.traceback
    assert agent.failure.traceback in agent.log
    assert read_json(agent.trial.outcome) is None


def test_a_users_error_is_its_sentences_without_a_traceback(agent: Agent) -> None:
    assert agent.run("model_def:Unwrapped") == 1
    assert agent.events == [("failed", None)]
    problems = [
        f"Unwrapped: __init__ wraps no {what}; call context.wrap_{what}, or a checkpoint would miss it"
        for what in ("model", "optimizer")
    ]
    assert agent.failure.message.splitlines() == problems
    assert agent.failure.user_error
    assert agent.failure.traceback == ""
    assert agent.log == "hpc-det: " + "\n".join(problems) + "\n"
