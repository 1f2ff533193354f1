"""Runs of the story trial through the real command line, and the files that they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.committed import newest_good
from hpc_det.node.process import descendants
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import read_reports
from hpc_det.view.state import ExperimentView
from tests import processes
from tests.wait import DEADLINE_S, wait_for

HERE = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("hpc-det")
DIRECT = "entrypoint=python3 -m hpc_det.launch.direct --trial model_def:StoryTrial"
"""Entrypoint of tests that do not depend on the launcher: torchrun would load torch, too."""
WAITS_AT = "hyperparameters.waits_at={}"
"""Number of batches after which the trial waits until a test stops or kills it."""


def warm_ranks_of(trial: str) -> str:
    """Return an entrypoint for tests that do not depend on how a rank starts either; needs the fixture `warm`.

    `trial`: a class of model_def, or MODULE:CLASS.
    """
    name = trial if ":" in trial else f"model_def:{trial}"
    return f"entrypoint=python3 {HERE / 'warm' / 'launcher.py'} --trial {name}"


WARM = warm_ranks_of("StoryTrial")


def hpc_det(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the console script in a separate process."""
    command = [str(COMMAND), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass(frozen=True)
class Story:
    """An experiment under test."""

    number: int
    trial: TrialFolder

    @classmethod
    def begin(
        cls,
        *overrides: str,
        cluster: str = "local",
        config: Path = HERE / "story.yaml",
        context: Path = HERE / "trial",
    ) -> Story:
        options = [word for override in overrides for word in ("--config", override)]
        created = hpc_det("experiment", "create", config, context, "--cluster", cluster, *options)
        return cls.of(int(created.stdout.splitlines()[-1].removeprefix("Created experiment ")))

    @classmethod
    def of(cls, number: int) -> Story:
        return cls(number, ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).folder(number).trial())

    def wait(self, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        try:
            return hpc_det("experiment", "wait", self.number, check=check)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not ended within {DEADLINE_S:.0f} s\n{self.logged}")

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(hpc_det("experiment", "describe", self.number, "--json").stdout)
        return described

    @property
    def job_id(self) -> str:
        (submitted,) = ExperimentView(self.trial.experiment()).jobs
        return submitted.job_id

    @property
    def batches_reported(self) -> int:
        return max((record["steps"] for record in read_reports(self.trial.metrics)), default=0)

    @property
    def causes(self) -> list[str]:
        return [end.cause.value for end in Journal(self.trial.journal).history()]

    @property
    def series(self) -> list[tuple[str, int, dict[str, float]]]:
        """Every reported metric, in order."""
        return [(record["kind"], record["steps"], record["metrics"]) for record in read_reports(self.trial.metrics)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        checkpoint, _ = newest_good(self.trial.checkpoints)
        assert checkpoint is not None
        state = torch.load(checkpoint.path / "state_dict.pth", weights_only=True)
        models: list[dict[str, torch.Tensor]] = state["models_state_dict"]
        return {f"{i}.{name}": weight for i, model in enumerate(models) for name, weight in model.items()}

    @property
    def logged(self) -> str:
        return self.trial.job_log.read_text()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; on a timeout, fail with the log."""
        wait_for(condition, DEADLINE_S, lambda: self.logged)

    def until_batch(self, batch: int) -> None:
        self.until(lambda: self.batches_reported >= batch)

    def until_ended(self, attempts: int) -> None:
        self.until(lambda: len(self.causes) >= attempts)

    def pids(self, module: str) -> list[int]:
        """Return the PIDs of processes of the local job that run `python -m module`."""
        job = int(self.job_id.partition("-")[0])
        return sorted({*descendants(job)} & {*processes.programs(module)})

    def rank_pid(self, rank: int) -> int:
        """Return the PID of the process that writes the log of a rank, also on a node of a lab: all share this
        machine's /proc.
        """
        (pid,) = processes.ranks(self.trial.path, Journal(self.trial.journal).last_attempt(), rank)
        return pid

    def job_pids(self) -> list[int]:
        """Return the PIDs of the processes of its jobs on a lab."""
        return processes.running("hpc_det.launch.job", self.trial.experiment().path)

    def same_as(self, other: Story) -> bool:
        """Check that every reported metric and the final weights are bit-equal."""
        assert self.series == other.series
        mine, others = self.weights, other.weights
        assert mine.keys() == others.keys()
        assert [name for name, weight in mine.items() if not _are_equal(weight, others[name])] == []
        return True


def _are_equal(mine: Any, other: Any) -> bool:
    return torch.equal(mine, other) if isinstance(mine, torch.Tensor) else bool(mine == other)
