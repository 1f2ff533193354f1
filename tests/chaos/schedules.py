"""Random preemptions of a random training, all drawn from one seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_det.config.rank_variables import RESUME_CHECK, stops_as_value
from tests.e2e.story import HERE as E2E

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals that Slurm and PBS send, or that a site may configure."""
BETWEEN = ("validation", "validation end", "epoch end", "report", "save", "write", "committed")
AT_START = ("init", "ready")
"""Attempts that are stopped there train no batch."""
LAST_RANK_TOO = ("batch", "validation", "epoch end", "report", *AT_START)
"""Moments that every rank reaches."""


@dataclass(frozen=True, kw_only=True)
class TrainerSchedule:
    """The schedule of a TorchTrainer's program: see driver.py."""

    seed: int
    training: Mapping[str, Any]
    signals: Mapping[int, Sequence[Mapping[str, Any]]]
    """By attempt."""

    def __str__(self) -> str:
        return f"schedule trainer-{self.seed}\n{json.dumps(self.training)}\n{json.dumps(self.signals, indent=1)}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of an experiment's trial."""

    kind: str
    seed: int
    trial: str
    batches: int
    ranks: int
    config: Mapping[str, Any]
    """The configuration of the experiment, without its stops."""
    forced: tuple[int, ...] = ()
    """Numbers of trained batches at these stops, which all ranks know beforehand."""
    signals: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By attempt: see trials/disturb.py."""

    @property
    def attempts(self) -> int:
        """Largest number of attempts."""
        return len(self.forced) + len(self.signals) + 1

    def experiment(self, *, undisturbed: bool) -> dict[str, Any]:
        variables = {
            RESUME_CHECK: stops_as_value(() if undisturbed else self.forced),
            "CHAOS_PLAN": json.dumps({} if undisturbed else self.signals),
        }
        environment = {"environment_variables": [f"{name}={value}" for name, value in variables.items()]}
        entrypoint = f"python3 {E2E / 'warm' / 'launcher.py'} --trial {self.trial}"
        return {**self.config, "name": f"{self.kind} {self.seed}", "entrypoint": entrypoint, "environment": environment}

    def __str__(self) -> str:
        stops = {"forced": self.forced, "signals": self.signals}
        return (
            f"schedule {self.kind}-{self.seed}: {self.trial}\n{json.dumps(self.config)}\n{json.dumps(stops, indent=1)}"
        )


def schedule(kind: str, seed: int) -> Schedule:
    draws = random.Random(f"{kind} {seed}")
    return {"pytorch": _pytorch, "sharded": _sharded, "deepspeed": _deepspeed}[kind](draws, kind, seed)


# --- trainings


def _pytorch(draws: random.Random, kind: str, seed: int) -> Schedule:
    data = draws.choice(["shuffled", "shuffled", "ordered", "sampler", "batch_sampler", "own"])
    names = ["sgd", "adamw", "adagrad", "rmsprop", "nadam", "radam", "adamax", "asgd", "rprop"]
    hparams = {
        **_common(draws, data),
        "optimizers": draws.sample(names, draws.choice([1, 2])),
        "amp": draws.choice(["none", "none", "bfloat16", "float16"]),
        "freezes": False,
        "broadcast_buffers": draws.random() < 0.7,
    }
    if data != "own" and hparams["amp"] != "float16":  # a scaler requires that each optimizer has gradients
        hparams["freezes"] = draws.random() < 0.3
    trial = f"model_def:{draws.choice(['PlainTrial', 'PlainTrial', 'PlainTrial', 'FullTrial'])}"
    return _drawn(draws, kind, seed, trial, draws.choice([1, 2]), hparams)


def _sharded(draws: random.Random, kind: str, seed: int) -> Schedule:
    data = draws.choice(["shuffled", "ordered", "sampler", "batch_sampler"])
    common = _common(draws, data)
    hparams = {
        **common,
        "optimizers": draws.sample(["sgd", "adamw", "adagrad", "rmsprop"], draws.choice([1, 2])),
        "amp": draws.choice(["none", "bfloat16"]),
        "freezes": False,
        "reshard": draws.random() < 0.5,
        "mixed": draws.random() < 0.4 and common["norm"] != "batch",  # torch does not evaluate a batch norm in bfloat16
    }
    return _drawn(draws, kind, seed, "model_def:ShardedTrial", 2, hparams)


def _common(draws: random.Random, data: str) -> dict[str, Any]:
    workers = draws.choice([0, 0, 2]) if data != "own" else 0
    norm = draws.choice(["batch", "layer", "none"])
    return {
        "global_batch_size": draws.choice([4, 8]),
        # no rank has a batch of one record, for which a batch norm has no variance
        "records": draws.choice([40, 44] if norm == "batch" else [37, 40, 44, 46]),
        "data": data,
        "workers": workers,
        "persistent": workers > 0 and draws.random() < 0.5,
        "norm": norm,
        "dropout": draws.choice([0.0, 0.3]),
        "clips": draws.random() < 0.5,
        "lr_schedule": draws.choice(["step", "warm restarts", "warmup", "one cycle", "cyclic", "lambda"]),
        "lr_mode": draws.choice(["STEP_EVERY_BATCH", "STEP_EVERY_EPOCH", "STEP_EVERY_OPTIMIZER_STEP"]),
        "lr_frequency": draws.choice([1, 1, 2]),
    }


def _deepspeed(draws: random.Random, kind: str, seed: int) -> Schedule:
    is_piped = draws.random() < 0.3
    ranks = 2 if is_piped else draws.choice([1, 2, 2])
    bf16 = draws.random() < 0.2 and not is_piped
    stage = draws.choice([0, 1]) if is_piped else draws.choice([1, 2, 3] if bf16 else [0, 1, 2, 3])
    hparams = {
        "stage": stage,
        "bf16": bf16,
        "accumulation": draws.choice([1, 2, 3]),
        "persistence": draws.choice([0, 50, 10000]),
        "clips": draws.random() < 0.5,
        "dropout": draws.choice([0.0, 0.3]),
        "records": 48 if is_piped else draws.choice([42, 48]),
        "data": draws.choice(["shuffled", "ordered"]),
        "workers": draws.choice([0, 0, 2]),
    }
    return _drawn(draws, kind, seed, f"engines:{'PipedTrial' if is_piped else 'EngineTrial'}", ranks, hparams)


def _drawn(draws: random.Random, kind: str, seed: int, trial: str, ranks: int, hparams: Mapping[str, Any]) -> Schedule:
    batches = draws.randint(12, 24)
    periods = {
        "scheduling_unit": draws.choice([1, 3, 4, 7]),
        "min_validation_period": draws.choice([{"batches": 3}, {"batches": 5}, {"epochs": 1}, {"batches": 0}]),
        "min_checkpoint_period": draws.choice([{"batches": 1}, {"batches": 4}, {"epochs": 1}, {"batches": 0}]),
    }
    config = {
        **periods,
        "hyperparameters": dict(hparams),
        "resources": {"slots_per_trial": ranks},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": batches}},
        "checkpoint_policy": draws.choice(["best", "all", "none"]),
        "perform_initial_validation": draws.random() < 0.3,
        "asynchronous_checkpoints": draws.random() < 0.7,
        "checkpoint_storage": {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1},
        "max_restarts": 0,
        "reproducibility": {"experiment_seed": draws.randint(0, 10**6)},
    }
    if kind != "deepspeed":
        config["optimizations"] = {
            "aggregation_frequency": draws.choice([1, 1, 2, 3]),
            "average_aggregated_gradients": draws.random() < 0.5,
        }
    marks = [mark for period in periods.values() for mark in _multiples(period, batches)]
    forced, signals = _stops(draws, batches, ranks, marks)
    return Schedule(
        kind=kind,
        seed=seed,
        trial=trial,
        batches=batches,
        ranks=ranks,
        config=config,
        forced=forced,
        signals=signals,
    )


def _multiples(period: Any, batches: int) -> list[int]:
    """Return the batches before which an action is due; epochs have at most 11 batches."""
    length = period if isinstance(period, int) else period.get("batches", 11)
    return list(range(length, batches, length)) if length else []


def trainer_schedule(seed: int) -> TrainerSchedule:
    draws = random.Random(f"trainer {seed}")
    ranks, epochs = draws.choice([1, 2]), draws.choice([2, 3])
    workers = draws.choice([0, 0, 1])
    config = {
        "seed": draws.randint(0, 1000),
        "length": draws.choice([36, 42]),
        "workers": workers,
        "persistent": workers > 0 and draws.random() < 0.5,
        "ddp_args": {"broadcast_buffers": draws.random() < 0.5},
    }
    options = {
        "scheduler_step_freq": draws.choice(["batch", "epoch"]),
        "use_fp16": draws.random() < 0.3,
        "add_dist_sampler": draws.random() < 0.8,
    }
    training = {
        "ranks": ranks,
        "epochs": epochs,
        "batch_size": 6,
        "num_steps": draws.choice([None, 2, 5]),
        "config": config,
        "options": options,
    }
    return TrainerSchedule(seed=seed, training=training, signals=_trainer_stops(draws, ranks, 6 * epochs))


# --- stops


def _trainer_stops(draws: random.Random, ranks: int, steps: int) -> dict[int, list[dict[str, Any]]]:
    signals: dict[int, list[dict[str, Any]]] = {}
    at = 0
    for attempt in range(1, draws.randint(1, 5) + 1):
        where = "train" if attempt == 1 else draws.choice(["train", "train", "validate", "setup"])
        at = draws.randint(at, steps // 2 if attempt == 1 else steps - 1)
        signals[attempt] = [
            {
                "where": where,
                "at": 0 if where == "setup" else at,
                "signals": draws.sample(SIGNALS, draws.choice([1, 1, 2])),
                "to": draws.choice(["agent", "agent", "driver", "both"]),
                "rank": draws.randrange(ranks),
            }
        ]
    return signals


def _stops(
    draws: random.Random, batches: int, ranks: int, marks: Sequence[int]
) -> tuple[tuple[int, ...], dict[int, list[dict[str, Any]]]]:
    """Draw one to five stops, in order; the first comes early enough to have an effect."""
    forced: list[int] = []
    signals: dict[int, list[dict[str, Any]]] = {}
    at = 0
    for attempt in range(1, draws.randint(1, 5) + 1):
        is_first = attempt == 1
        last = batches - 6 if is_first else batches - 1
        ahead = [mark for mark in marks if at < mark <= last]
        at = draws.choice(ahead) if ahead and draws.random() < 0.4 else draws.randint(min(at + 1, last), last)
        if draws.random() < 0.25:
            forced.append(at)
            continue
        where = "batch" if is_first else draws.choice(["batch", "batch", *BETWEEN, *AT_START])
        signals[attempt] = [_signal(draws, where, at - (where == "batch"), ranks)]
        if draws.random() < 0.3:  # a second signal, while the ranks stop
            signals[attempt].append(_signal(draws, draws.choice(["save", "write", "committed", "batch"]), at, ranks))
    return tuple(sorted({*forced})), signals


def _signal(draws: random.Random, where: str, at: int, ranks: int) -> dict[str, Any]:
    return {
        "where": where,
        "at": 0 if where in AT_START else at,
        "signals": draws.sample(SIGNALS, draws.choice([1, 1, 2])),
        "to": draws.choice(["agent", "agent", "rank", "both"]),
        "rank": draws.randrange(ranks) if where in LAST_RANK_TOO else 0,
    }
