"""A small GPT-2 that learns the next character of the sonnets with Hugging Face's Trainer. Nothing is downloaded."""

import sonnets
import torch
from sonnets import CHARACTERS, TEXT, TRAINING
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hpc_det.core
from hpc_det.integrations.transformers import HpcDetCallback, training_arguments


class Stretches(sonnets.Stretches):
    """Stretches of `length` characters, one for every `stride`-th position of a text."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        stretch, _ = super().__getitem__(index)
        return {"input_ids": stretch, "labels": stretch}  # the model compares with the next character


def build_model(length: int, width: int, dropout: float) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(CHARACTERS),
            n_positions=length,
            n_embd=width,
            n_layer=2,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def main() -> None:
    with hpc_det.core.init() as core:
        hparams = core.hparams
        length = hparams["sequence_length"]
        batch_size = hparams["global_batch_size"] // core.distributed.size
        arguments = TrainingArguments(
            **training_arguments(core),  # output folder, seed, max_steps
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            learning_rate=hparams["learning_rate"],
            warmup_steps=hparams["warmup_batches"],
            logging_steps=hparams["logging_batches"],
            eval_strategy="steps",
            eval_steps=hparams["validation_batches"],
            save_steps=hparams["checkpoint_batches"],
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            build_model(length, hparams["width"], hparams["dropout"]),
            arguments,
            train_dataset=Stretches(TEXT[:TRAINING], length, stride=1),
            eval_dataset=Stretches(TEXT[TRAINING:], length, stride=length),
            callbacks=[HpcDetCallback(core)],
        )
        trainer.train(resume_from_checkpoint=core.latest_checkpoint)


if __name__ == "__main__":
    main()
