"""The trial with ZeRO as a script: train.py BATCHES [CHECKPOINT]"""

import sys

import torch.distributed as dist
from model_def import Zero

from hpc_det.pytorch import Batch
from hpc_det.pytorch.deepspeed import Trainer, init

# In a job, the hyperparameters and the configuration of the experiment replace these.
HPARAMS = {"stage": 2, "accumulation": 4, "waits_at": [], "raise_at": -1, "dies_in_save": False}
CONFIG = {"searcher": {"metric": "loss"}, "reproducibility": {"experiment_seed": 5}}

batches, checkpoint = int(sys.argv[1]), (sys.argv[2:] or [None])[0]
with init(hparams=HPARAMS, exp_conf=CONFIG) as context:
    Trainer(Zero(context), context).fit(
        max_length=Batch(batches),
        validation_period=Batch(10),
        checkpoint_period=Batch(8),
        reporting_period=Batch(1),
        checkpoint_policy="none",
        latest_checkpoint=checkpoint,
    )
# In one write: ranks share the pipe.
sys.stdout.write(f"left the block, in a group: {dist.is_initialized()}\n")
