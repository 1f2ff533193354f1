"""The story of a gang whose trial has engines: the content of their shards, and the records they were trained on."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from hpc_det.checkpoint.committed import newest_good
from hpc_det.node.json_files import read_json
from tests.e2e.story import HERE, Story, warm_ranks_of

ENGINES = ("zero0", "zero1", "zero2", "zero3", "pipeline")


class UndisturbedEngines(Protocol):
    def __call__(self, engine: str, accumulation: int, slots: int = 4) -> EngineStory: ...


def four_slots(root: Path) -> None:
    """Write the profile of the cluster `here`: four CPU slots, whatever this machine has."""
    profile = root / "conf" / "cluster" / "here.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("{name: here, scheduler: local, slots_per_node: 4, max_nodes: 1, slot_type: cpu}\n")


class EngineStory(Story):
    @classmethod
    def with_engine(
        cls, engine: str, accumulation: int, *overrides: str, cluster: str = "here", launcher: str = "deepspeed"
    ) -> EngineStory:
        """Start a story with an engine of `ENGINES`, by default on four ranks. `launcher`: a module of hpc_det.launch,
        or `warm`.
        """
        name, stage = ("Piped", 1) if engine == "pipeline" else ("Zero", int(engine.removeprefix("zero")))
        fresh = f"entrypoint=python3 -m hpc_det.launch.{launcher} --trial model_def:{name}"
        begun = cls.begin(
            warm_ranks_of(name) if launcher == "warm" else fresh,
            f"hyperparameters.stage={stage}",
            f"hyperparameters.accumulation={accumulation}",
            *overrides,
            cluster=cluster,
            config=HERE / "engines.yaml",
            context=HERE / "engines",
        )
        return cls(begun.number, begun.trial)

    @property
    def weights(self) -> dict[str, Any]:
        """Everything that the newest checkpoint contains of engines and ranks, by file and place, except the names of
        event files, which differ for each attempt.
        """
        checkpoint, _ = newest_good(self.trial.checkpoints)
        assert checkpoint is not None
        files = [name for name in checkpoint.files if re.fullmatch(r"model\d/.*\.pt|rank-\d\.pth", name)]
        leaves = (leaf for name in files for leaf in _leaves(_load(checkpoint.path / name), name))
        return {place: leaf for place, leaf in leaves if ": tensorboard: " not in place}

    def micro_batches(self, rank: int, *attempts: int) -> list[str]:
        """Return the log lines about micro batches of this rank, in order, from these attempts or from all."""
        return [line for line in self.lines(rank, *attempts) if line.startswith("micro batch of ")]

    def lines(self, rank: int, *attempts: int) -> list[str]:
        """Return the log lines of this rank from these attempts, or from all."""
        every = range(1, len(self.causes) + 2)
        logs = [self.trial.rank_log(attempt, rank) for attempt in attempts or every]
        return [line for log in logs if log.exists() for line in log.read_text().splitlines()]

    def until_waiting(self, batch: int) -> None:
        """Wait until the last rank waits in the middle of that batch."""
        self.until(lambda: f"waiting in {batch}" in self.lines(self.last_rank))

    @property
    def last_rank(self) -> int:
        plan = read_json(self.trial.experiment().plan)
        assert plan is not None
        return int(plan["nodes"] * plan["ranks_per_node"]) - 1


class _Named:
    """Replaces DeepSpeed's own classes, whose import takes seconds and changes the environment."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # getattr is called with one of those classes for the member of an enum, as Python 3.11.2 pickles it
        return _Named if module.startswith("deepspeed.") or name == "getattr" else super().find_class(module, name)


def _load(path: Path) -> Any:
    reading = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler, load=pickle.load)
    return torch.load(path, weights_only=False, pickle_module=reading)


def _leaves(content: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{place}: {key}")
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from _leaves(value, f"{place}[{number}]")
    elif hasattr(content, "__dict__") and not isinstance(content, torch.Tensor):
        yield from _leaves(vars(content), place)
    else:
        yield place, content
