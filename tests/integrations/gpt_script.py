"""Trains a tiny GPT-2, made here, with Hugging Face's Trainer or TRL's SFTTrainer, also sharded."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import DistributedType, PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import hpc_det.core
from hpc_det.integrations.transformers import HpcDetCallback, training_arguments
from tests.integrations.hf_script import Stops, write

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "wolves")


def model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=1
    )
    return GPT2LMHeadModel(config)


def tokens() -> list[dict[str, torch.Tensor]]:
    numbers = torch.randint(2, 32, (48, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in numbers]


def main(
    result: str, *, stop_at: int = 0, sft: bool = False, config: dict[str, Any] | None = None, **options: Any
) -> None:
    """Train until the end or until the stop, and write what became of it to `result`-RANK.json."""
    torch.set_num_threads(1)
    with hpc_det.core.init(config={"reproducibility": {"experiment_seed": 3}, **(config or {})}, name="gpt") as core:
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": 8 // core.distributed.size,
            "logging_steps": 1,
            "num_train_epochs": 2,
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            **training_arguments(core),
            **options,
        }
        settings = (SFTConfig if sft else TrainingArguments)(**arguments)
        if arguments.get("fsdp"):
            # Accelerate shards on GPUs only, and otherwise replicates the model without a message
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        callbacks = [Stops(core, stop_at), HpcDetCallback(core)]
        if sft:
            trainer = sft_trainer(settings, callbacks)
        else:
            trainer = Trainer(model(), settings, train_dataset=tokens(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=core.latest_checkpoint)
        write(core, result, trainer.accelerator.unwrap_model(trainer.model), trainer.state, seen=[])


def sft_trainer(settings: SFTConfig, callbacks: list[Any]) -> Any:
    names = ["<eos>", "<pad>", "<unk>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(names))}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    texts = [" ".join(WORDS[i % 7 + j] for j in range(8)) for i in range(48)]
    return SFTTrainer(
        model(),
        settings,
        train_dataset=Dataset.from_dict({"text": texts}),
        eval_dataset=Dataset.from_dict({"text": texts[:8]}),
        processing_class=fast,
        callbacks=callbacks,
    )
