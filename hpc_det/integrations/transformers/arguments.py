"""Arguments of a Trainer in a trial: those that the trial determines, and checks of all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerState, TrainingArguments

from hpc_det.core import Core
from hpc_det.errors import count
from hpc_det.integrations.transformers.checkpoint_files import saved_ranks


def training_arguments(core: Core) -> dict[str, Any]:
    """Return arguments of TrainingArguments: an output folder, the seed of the trial, and its length.

    Without `searcher.max_length` the length is not among them.
    """
    arguments = {"output_dir": str(core.info.folder / "trainer"), "seed": core.info.trial_seed}
    return {**arguments, **length_of(core)}


def length_of(core: Core) -> dict[str, int]:
    """Return `searcher.max_length` as max_steps or num_train_epochs; {} without one."""
    length = core.config.get("searcher", {}).get("max_length")
    if not length:
        return {}
    unit, amount = ("batches", length) if isinstance(length, int) else next(iter(length.items()))
    if unit == "epochs":
        return {"num_train_epochs": amount}
    return {"max_steps": max(amount // core.hparams["global_batch_size"], 1) if unit == "records" else amount}


def problems_of(core: Core, args: TrainingArguments, state: TrainerState, resumed_at: int) -> list[str]:
    """Return what must change before this training. `resumed_at`: optimizer steps of the newest checkpoint."""
    return [
        *_of_ranks(core, args),
        *_of_checkpoints(args),
        *_of_best(core, args),
        *_of_length(core, args),
        *_of_resume(state, resumed_at),
    ]


def _of_ranks(core: Core, args: TrainingArguments) -> Iterator[str]:
    if args.world_size != core.distributed.size:
        yield (
            f"the Trainer would train {core.distributed.size} models, since it sees {args.world_size} rank where "
            f"hpc_det has {core.distributed.size}; create TrainingArguments inside of the block of init, with "
            f"use_cpu=True on nodes without GPUs"
        )


def _of_checkpoints(args: TrainingArguments) -> Iterator[str]:
    if args.enable_jit_checkpoint:
        yield (
            "TrainingArguments.enable_jit_checkpoint: it takes SIGTERM from hpc_det, and each rank decides alone when "
            "to save, so ranks hang; remove it, HpcDetCallback saves at a stop"
        )
    if args.save_only_model:
        yield "TrainingArguments.save_only_model: a resume needs the optimizer, too; remove it"
    if args.save_strategy == "best":
        yield (
            "TrainingArguments.save_strategy: 'best' saves nothing at a stop; use 'steps' or 'epoch', and "
            "searcher.metric to keep the best checkpoint"
        )
    if args.push_to_hub and args.hub_strategy in ("checkpoint", "all_checkpoints"):
        yield (
            f"TrainingArguments.hub_strategy: {args.hub_strategy.value!r} uploads a checkpoint in the background, "
            f"after it has been moved to the trial's checkpoints; use 'end' or 'every_save'"
        )


def _of_best(core: Core, args: TrainingArguments) -> Iterator[str]:
    if not args.load_best_model_at_end:
        return
    searcher = core.config.get("searcher", {})
    metric = args.metric_for_best_model
    wanted = metric if metric.startswith("eval_") else f"eval_{metric}"
    if searcher.get("metric") != wanted or searcher.get("smaller_is_better", True) == args.greater_is_better:
        yield (
            f"TrainingArguments.load_best_model_at_end: the best checkpoint by {wanted} would be deleted, since "
            f"searcher.metric is {searcher.get('metric')!r} with smaller_is_better "
            f"{searcher.get('smaller_is_better', True)}; set searcher.metric: {wanted} and "
            f"smaller_is_better: {str(not args.greater_is_better).lower()}"
        )


def _of_length(core: Core, args: TrainingArguments) -> Iterator[str]:
    length = length_of(core)
    if any(getattr(args, name) != amount for name, amount in length.items()) or (
        "num_train_epochs" in length and args.max_steps > 0
    ):
        yield (
            f"searcher.max_length: it means {length}, but TrainingArguments have max_steps {args.max_steps} and "
            f"num_train_epochs {args.num_train_epochs}; pass **training_arguments(core)"
        )


def _of_resume(state: TrainerState, resumed_at: int) -> Iterator[str]:
    if state.global_step != resumed_at:
        yield (
            f"the Trainer begins at step {state.global_step}, but the newest checkpoint of this trial is of step "
            f"{resumed_at}; call trainer.train(resume_from_checkpoint=core.latest_checkpoint)"
        )


def note_inexact(core: Core, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
    """Print in which respect this resume differs from an uninterrupted run, as far as it can be known."""
    if not core.latest_checkpoint:
        return
    ranks = saved_ranks(core.latest_checkpoint)
    if ranks and ranks != core.distributed.size:
        _note(f"the checkpoint is of {count(ranks, 'rank')}, here are {core.distributed.size}: other records follow")
    if args.ignore_data_skip:
        _note("ignore_data_skip: the open pass begins again, so records are repeated")
    if isinstance(getattr(loader, "dataset", None), IterableDataset) and state.epoch >= 1:
        _note(
            "the training data is an IterableDataset, which the Trainer resumes in its first pass only: the open pass "
            "begins again"
        )


def _note(text: str) -> None:
    print(f"hpc-det: {text}", flush=True)
