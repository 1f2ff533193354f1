"""Fine-tune a causal language model with the Trainer of Hugging Face on a text file; a tenth is for evaluation."""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

import hpc_det.core
from hpc_det.integrations.transformers import HpcDetCallback, training_arguments


class Blocks(Dataset):
    """Consecutive blocks of `length` tokens of a text."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.blocks = tokens[: len(tokens) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}  # the model shifts the labels


def main() -> None:
    with hpc_det.core.init() as core:
        hparams, length = core.hparams, core.hparams["length"]
        tokenizer = AutoTokenizer.from_pretrained(hparams["model"])
        model = AutoModelForCausalLM.from_pretrained(hparams["model"], dtype=torch.float32)  # bf16 needs it, too
        text = Path(core.config["data"]["text"]).expanduser().read_text(encoding="utf-8")
        tokens = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        training = len(tokens) * 9 // 10
        accumulated, rest = divmod(hparams["global_batch_size"], hparams["blocks_per_slot"] * core.distributed.size)
        if rest or not accumulated:
            raise ValueError("global_batch_size: must be a multiple of blocks_per_slot times the number of slots")
        arguments = TrainingArguments(
            **training_arguments(core),  # output folder, seed and length
            per_device_train_batch_size=hparams["blocks_per_slot"],
            per_device_eval_batch_size=hparams["blocks_per_slot"],
            gradient_accumulation_steps=accumulated,
            eval_strategy="steps",
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
            **hparams["trainer"],
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Blocks(tokens[:training], length),
            eval_dataset=Blocks(tokens[training:], length),
            data_collator=default_data_collator,  # all blocks have the same length
            processing_class=tokenizer,  # checkpoints contain the tokenizer, too
            callbacks=[HpcDetCallback(core)],
        )
        trainer.train(resume_from_checkpoint=core.latest_checkpoint)


if __name__ == "__main__":
    main()
