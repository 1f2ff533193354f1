"""A script as a user starts it without a job. It trains until the file $ENOUGH exists, in steps of 20 ms."""

import os
import time
from pathlib import Path

from torch.utils.data import DataLoader

import hpc_det.core

with hpc_det.core.init(hparams={"lr": 0.1}) as core:
    count = {"batches": 0}
    core.track(count=count)
    if core.latest_checkpoint is None:
        core.save()
    begin = core.step
    for _ in core.batches(DataLoader(range(100_000))):
        count["batches"] += 1
        core.report(core.step, {"loss": 1 / core.step})
        if core.step == begin + 4:
            core.save()
        time.sleep(0.02)
        if core.distributed.broadcast_json(Path(os.environ["ENOUGH"]).exists()):
            break
    if not core.should_stop():
        core.report(core.step, {"validation_loss": count["batches"] - core.step}, group="validation")
