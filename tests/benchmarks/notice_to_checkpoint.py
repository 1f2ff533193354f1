"""Measure from the preemption signal to the committed checkpoint, and to the next attempt's first batch: two ranks."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from hpc_det.checkpoint.committed import committed
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import read_reports
from tests.e2e.story import COMMAND, Story

ROUNDS = 5
ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "digits": ROOT / "conf" / "experiment" / "digits.yaml",
    "deepspeed_zero3": ROOT / "docs" / "examples" / "deepspeed_zero3" / "tiny.yaml",
}
OPTIONS = (
    "searcher.max_length={batches: 460}",
    "scheduling_unit=1",
    "min_checkpoint_period={batches: 0}",
    "checkpoint_policy=none",
)


SPANS = (
    "signal to committed checkpoint",
    "signal to the next attempt's first batch",
    "start of that attempt to its first batch",
)


def main() -> None:
    for name in EXAMPLES:
        with tempfile.TemporaryDirectory() as root:
            os.environ["HPC_DET_ROOT"] = root
            rounds = [_one_preemption(name, number) for number in range(1, ROUNDS + 1)]
        print(f"{f'{name}, 2 ranks on this machine, {ROUNDS} preemptions':48}     min  median      max [s]")
        for span, values in zip(SPANS, zip(*rounds, strict=True), strict=True):
            print(f"{span:48} {min(values):7.3f} {statistics.median(values):7.3f} {max(values):7.3f}")


def _one_preemption(name: str, number: int) -> tuple[float, float, float]:
    config, code = EXAMPLES[name], ROOT / "docs" / "examples" / name
    options = [word for option in OPTIONS for word in ("--config", option)]
    create = [str(COMMAND), "experiment", "create", str(config), str(code), "--cluster", "local", *options]
    subprocess.run(create, check=True, stdout=subprocess.DEVNULL)
    story = Story.of(number)
    story.until_batch(100)
    (agent,) = story.pids("hpc_det.launch.agent")
    signalled = time.time()
    os.kill(agent, signal.SIGTERM)
    story.until(lambda: bool(story.causes))
    saved = committed(story.trial.checkpoints)[0].time
    story.wait()
    first = next(record for record in read_reports(story.trial.metrics) if record["attempt"] == 2)
    started = next(event for event in Journal(story.trial.journal).events() if event["attempt"] == 2)
    return saved - signalled, first["time"] - signalled, first["time"] - started["time"]


if __name__ == "__main__":
    main()
