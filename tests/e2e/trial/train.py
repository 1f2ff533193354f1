"""The story trial as a script."""

import sys

import torch.distributed as dist
from model_def import StoryTrial

from hpc_det.pytorch import Batch, Trainer, init

# In a job, the hyperparameters and the configuration of the experiment replace these.
HPARAMS = {"global_batch_size": 48, "batch_s": 0.03, "raise_at": -1, "die_at": -1, "waits_at": -1}
CONFIG = {
    "searcher": {"metric": "accuracy", "smaller_is_better": False, "max_length": {"batches": 100000}},
    "reproducibility": {"experiment_seed": 5},
}

with init(hparams=HPARAMS, exp_conf=CONFIG) as context:
    Trainer(StoryTrial(context), context).fit(
        validation_period=Batch(10),
        checkpoint_period=Batch(8),
        reporting_period=Batch(1),
        checkpoint_policy="none",
    )
# In one write: ranks share the pipe.
sys.stdout.write(f"left the block, in a group: {dist.is_initialized()}\n")
