"""Hugging Face's Trainer and the trainers of TRL on hpc_det.core: reports, exact stops, checkpoints and searches.

    with hpc_det.core.init() as core:
        arguments = TrainingArguments(**training_arguments(core), per_device_train_batch_size=8)
        trainer = Trainer(build_model(), arguments, train_dataset=data, callbacks=[HpcDetCallback(core)])
        trainer.train(resume_from_checkpoint=core.latest_checkpoint)

A batch of hpc_det is an optimizer step of the Trainer. The Trainer writes a checkpoint into its output folder; the
callback commits it and removes it there. What a resume repeats exactly is on docs/how-to/hugging-face.md.
"""

from hpc_det.integrations.transformers.arguments import training_arguments
from hpc_det.integrations.transformers.callback import HpcDetCallback

__all__ = ["HpcDetCallback", "training_arguments"]
