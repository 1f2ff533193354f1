"""hpc-det experiment describe."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.cli import state as experiment_state
from hpc_det.cli import story
from hpc_det.cli.listing import as_json, iso, number, values_in_words
from hpc_det.cli.state import ExperimentState
from hpc_det.cli.story import AttemptStory, Metrics
from hpc_det.cli.watch import states
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.folders import ExperimentFolder


def described(experiment: ExperimentFolder) -> dict[str, Any]:
    """The record that `describe --json` prints."""
    trial = experiment.trial()
    state = states([experiment])[experiment.id]
    plan = JobPlan.from_json(experiment.plan.read_text(encoding="utf-8"))
    config = json.loads(experiment.effective.read_text(encoding="utf-8"))
    submitted, metrics = experiment_state.jobs(experiment), Metrics.read(trial)
    return {
        "id": experiment.id,
        "name": plan.name,
        "state": state.value,
        "why": experiment_state.why_not_completed(experiment, state) if state in _UNWANTED else None,
        "folder": str(experiment.path),
        "entrypoint": config["entrypoint"],
        "searcher": config["searcher"],
        "slots": plan.world_size,
        "nodes": plan.nodes,
        "ranks_per_node": plan.ranks_per_node,
        "scheduler": plan.scheduler,
        "job_id": experiment_state.job_ids(experiment)[-1] if submitted else None,
        "submitted": iso(submitted[0].submitted) if submitted else None,
        "batches": metrics.batches,
        "total_batches": metrics.total,
        "training": metrics.training or None,
        "validation": metrics.validation or None,
        "best": as_json(metrics.best),
        "checkpoints": [_checkpoint(item) for item in committed(trial.checkpoints)],
        "attempts": [_attempt(item) for item in story.attempts(trial)],
    }


_UNWANTED = (ExperimentState.ERROR, ExperimentState.CANCELED)


def _checkpoint(item: Committed) -> dict[str, Any]:
    complete = story.is_complete(item)
    return {"uuid": item.uuid, "batches": item.steps, "time": iso(item.time), "complete": complete}


def _attempt(item: AttemptStory) -> dict[str, Any]:
    return {**asdict(item), "started": iso(item.started), "ended": iso(item.ended) if item.ended else None}


def in_words(experiment: ExperimentFolder) -> str:
    """The same for people."""
    record = described(experiment)
    told = story.attempts(experiment.trial())
    is_over = ExperimentState(record["state"]).is_final
    sections = [
        list(_facts(record)),
        _section("Attempts", [story.in_words(item, time.time(), is_over=is_over) for item in told]),
        _section("Metrics", list(_metrics(record))),
        _section("Checkpoints", [_checkpoint_in_words(item) for item in record["checkpoints"]]),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _facts(record: dict[str, Any]) -> Iterator[str]:
    yield f"Experiment {record['id']}: {record['name']}"
    rows = {
        "State": record["state"] + (f": {record['why']}" if record["why"] else ""),
        "Progress": f"{record['batches']} of {record['total_batches'] or '?'} batches",
        "Job": f"{record['job_id']} ({record['scheduler']}), submitted {record['submitted']}",
        "Slots": f"{record['slots']} on {record['nodes']} node(s), {record['ranks_per_node']} each",
        "Entrypoint": _command(record["entrypoint"]),
        "Searcher": json.dumps(record["searcher"]),
        "Folder": record["folder"],
    }
    yield from (f"  {name + ':':<12}{text}" for name, text in rows.items())


def _command(entrypoint: str | list[str]) -> str:
    return entrypoint if isinstance(entrypoint, str) else shlex.join(entrypoint)


def _metrics(record: dict[str, Any]) -> Iterator[str]:
    for name, metrics in (("last training", record["training"]), ("last validation", record["validation"])):
        if metrics:
            yield f"{name}: {values_in_words(metrics)}"
    if best := record["best"]:
        yield f"best validation: {best['metric']} {number(best['value'])} at batch {best['batches']}"


def _checkpoint_in_words(item: dict[str, Any]) -> str:
    damage = "" if item["complete"] else ", files are missing or cut"
    return f"{item['uuid']} at batch {item['batches']}, {item['time']}{damage}"


def _section(heading: str, lines: list[str]) -> list[str]:
    return [f"{heading}:", *(f"  {line}" for line in lines)] if lines else []
