"""Trainables for tests, without torch and fast."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from hpc_det.errors import InvalidHP
from hpc_det.sgd.tune.trainable import Trainable
from tests.wait import DEADLINE_S, wait_for


class Line(Trainable):
    """The loss decreases by `rate` in each iteration; `weight` is its only state."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.weight = 10.0

    def step(self) -> dict[str, Any]:
        self.weight -= self.config["rate"]
        return {"loss": self.weight, "pid": os.getpid()}

    def save_checkpoint(self, folder: str) -> str:
        path = Path(folder) / "line.json"
        path.write_text(json.dumps(self.weight))
        return str(path)

    def load_checkpoint(self, path: str) -> None:
        self.weight = json.loads(Path(path).read_text())


class Fragile(Line):
    """Dies once in the second iteration, raises an error for a negative rate, and refuses a rate of 0."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if config["rate"] == 0:
            raise InvalidHP("rate: 0 goes nowhere")

    def step(self) -> dict[str, Any]:
        if self.config["rate"] < 0:
            raise ValueError("the loss grows")
        assert self.trial_folder
        died = self.trial_folder / "died"
        if self.training_iteration == 1 and not died.exists():
            died.touch()
            print("dying", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class Slow(Line):
    """From the third iteration on, waits until the run folder contains a file `go`."""

    def step(self) -> dict[str, Any]:
        assert self.trial_folder
        (self.trial_folder / f"began-{self.training_iteration}").touch()
        go = self.trial_folder.parent.parent / "go"
        wait_for(lambda: self.training_iteration < 2 or go.exists(), DEADLINE_S)
        return super().step()


class Valley(Trainable):
    """The loss is the distance to the iteration with the lowest loss."""

    def setup(self, config: dict[str, Any]) -> None:
        self.lowest = config["net"]["lowest"]

    def step(self) -> dict[str, Any]:
        return {"loss": abs(self.training_iteration + 1 - self.lowest)}

    def save_checkpoint(self, folder: str) -> str:
        path = Path(folder) / "iteration"
        path.write_text(str(self.training_iteration + 1))
        return str(path)

    def load_checkpoint(self, path: str) -> None:
        pass
