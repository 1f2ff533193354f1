"""A script with a Trainer that sets its own length and periods."""

from __future__ import annotations

from model_def import LeakyTrial  # type: ignore[import-not-found]

from hpc_det.pytorch import Batch, Trainer, init

with init() as context:
    Trainer(LeakyTrial(context), context).fit(max_length=Batch(1_000_000), validation_period=Batch(1000))
