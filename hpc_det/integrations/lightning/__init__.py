"""Lightning: the Trainer and Fabric under hpc_det.

with hpc_det.core.init() as core:
    callback = HpcDetCallback(core)
    loader = DataLoader(data, batch_size=32, sampler=ResumableSampler(core, data))
    trainer = Trainer(devices=core.distributed.local_size, num_nodes=core.distributed.nodes,
                      plugins=[HpcDetEnvironment(core)], callbacks=[callback], max_epochs=10)
    trainer.fit(model, loader, ckpt_path=callback.ckpt_path)
"""

from hpc_det.integrations.lightning.callback import HpcDetCallback
from hpc_det.integrations.lightning.environment import HpcDetEnvironment
from hpc_det.integrations.lightning.sampler import ResumableSampler

__all__ = ["HpcDetCallback", "HpcDetEnvironment", "ResumableSampler"]
