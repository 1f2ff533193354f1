"""The public Core API: what any training loop needs to report, save, resume, stop and take part in a search.

    with hpc_det.core.init() as core:
        model, optimizer = build(core.hparams)
        core.track(model=model, optimizer=optimizer)
        for batch in core.batches(loader):
            core.report(core.step, {"loss": train_one_batch(batch)})
        core.report(core.step, validate(model), group="validation")

It works in a job of hpc_det under every launcher, under torchrun, and in one process.
"""

from hpc_det.core.core import Core
from hpc_det.core.init import init
from hpc_det.core.loop import Info
from hpc_det.core.progress import Batch, Epoch
from hpc_det.core.search import Operation
from hpc_det.core.stop import Stop

__all__ = ["Batch", "Core", "Epoch", "Info", "Operation", "Stop", "init"]
