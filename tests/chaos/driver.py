"""The program of a TorchTrainer whose job a scheduler takes away: started again, it continues from its run folder."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from hpc_det.distributed.rank_process import log_to
from hpc_det.node.json_files import append_line
from hpc_det.sgd import BATCH_SIZE, TorchTrainer
from tests.processes import ancestors
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.runners import Regression
from tests.wait import DEADLINE_S

CALLS, FINAL = "calls.jsonl", "final.pt"


class Disturbed(Regression):
    """Sends the signals of a schedule from a rank to the agent of its node, to the driver, or to both."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.left = [each for each in config["signals"] if each["rank"] == self.world_rank]
        self.disturb("setup")

    def disturb(self, where: str) -> None:
        for each in [each for each in self.left if each["where"] == where and self.global_step >= each["at"]]:
            self.left.remove(each)
            Path(self.config["sent"]).touch()
            targets = {"agent": ancestors(os.getppid())[:1], "driver": [self.config["driver"]]}
            for name in each["signals"]:
                for pid in targets.get(each["to"], [*targets["agent"], *targets["driver"]]):
                    os.kill(pid, getattr(signal, name))

    def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        metrics = super().train_batch(batch, batch_info)
        self.disturb("train")
        return metrics

    def validate_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        self.disturb("validate")
        return super().validate_batch(batch, batch_info)


def drive(folder: Path, training: Mapping[str, Any], attempt: int, signals: Any, env: Mapping[str, str]) -> None:
    """Run the program in this process, which was forked from the fork server; agents are forked from it, too."""
    setattr(forkserver._forkserver, "ensure_running", lambda: None)  # noqa: B010  # it has forked this process
    os.environ.clear()
    os.environ.update(env)
    log_to(folder / f"driver-{attempt}.log")
    sent = folder / f"sent-{attempt}"
    config = {**training["config"], "signals": signals, "sent": str(sent), "driver": os.getpid()}
    config[BATCH_SIZE] = training["batch_size"]
    ranks = training["ranks"]
    with TorchTrainer(
        training_operator_cls=Disturbed,
        num_workers=ranks,
        executor=LocalNodes(1, ranks),
        run=folder / "run",
        config=config,
        heartbeat_timeout_s=DEADLINE_S,  # a slow agent must still receive its signal
        **training["options"],
    ) as trainer:
        for epoch in trainer.remaining(training["epochs"]):
            for number, result in enumerate(_calls(trainer, epoch, training["num_steps"])):
                call = f"call {number} of epoch {epoch}"
                append_line(folder / CALLS, {"call": call, "result": repr(result)}, durable=False)
                _until_heard(trainer, sent)
        torch.save(trainer.state_dict(), folder / FINAL)


def _calls(trainer: TorchTrainer, epoch: int, num_steps: int | None) -> Iterator[Any]:
    """Yield the results of the calls of a round, in order."""
    while trainer.epochs_done == epoch:
        yield trainer.train(num_steps)
    yield trainer.validate()
    yield trainer.apply_all_operators(lambda operator: operator.global_step)


def _until_heard(trainer: TorchTrainer, sent: Path) -> None:
    """Wait until the driver has processed the signal to an agent, before the next call."""
    gang = trainer._open_gang
    while sent.exists() and not gang._nodes.is_taken:
        gang._gang.poll()
        time.sleep(0.002)
