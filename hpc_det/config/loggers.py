"""The schema of `loggers`: services that receive a trial's metrics, and the checks of its entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from hpc_det.config.fields import DistinctTexts, OptionalText
from hpc_det.config.merge import Tree
from hpc_det.config.section import Section
from hpc_det.errors import Problem


class Wandb(Section):
    project: OptionalText = Field(
        default=None, description="Project of the runs; null: the variable WANDB_PROJECT, else W&B's default."
    )
    entity: OptionalText = Field(
        default=None, description="User or team that owns the project; null: the default of the user's W&B account."
    )
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="online: the node sends to the server, and falls back to offline if the server cannot be reached. "
        "offline: runs are written below the trial's folder, for `hpc-det experiment sync`.",
    )
    base_url: OptionalText = Field(
        default=None, description="URL of a W&B server; null: the variable WANDB_BASE_URL, else W&B's own server."
    )
    tags: DistinctTexts = Field(default=[], description="Tags of the runs, beside the labels of the experiment.")


class Mlflow(Section):
    tracking_uri: OptionalText = Field(
        default=None,
        description="URI of the tracking server or store, without a password; null: the variable MLFLOW_TRACKING_URI.",
    )
    experiment_name: OptionalText = Field(
        default=None, description="MLflow experiment of the runs; null: the name of the experiment."
    )
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="online: the node sends to tracking_uri, and falls back to offline if it cannot be reached. "
        "offline: runs are written into a SQLite file below the trial's folder, for `hpc-det experiment sync`.",
    )


class LoggerEntry(Section):
    """A logger; exactly one of wandb and mlflow is set."""

    wandb: Wandb | None = Field(default=None, description="Weights & Biases; needs the package wandb on the nodes.")
    mlflow: Mlflow | None = Field(
        default=None, description="MLflow; needs the package mlflow or mlflow-skinny on the nodes."
    )


KINDS = tuple(LoggerEntry.model_fields)
_ADDRESSES = {"wandb": "base_url", "mlflow": "tracking_uri"}
_PASSWORDS = {
    "wandb": "give the API key in the variable WANDB_API_KEY, or by `wandb login`",
    "mlflow": "give them in the variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
}


def logger_problems(experiment: Tree) -> Iterator[Problem]:
    """Yield the contradictions of the entries. No message contains an address, which may hold a password."""
    entries = experiment.get("loggers")
    first: dict[str, int] = {}
    for i, entry in enumerate(entries if isinstance(entries, list) else ()):
        if not isinstance(entry, dict):
            continue
        kinds = [kind for kind in KINDS if entry.get(kind) is not None]
        if not kinds and entry.keys() - set(KINDS):
            continue  # the schema reports the unknown key, of which a logger's name was probably meant
        if len(kinds) != 1:
            what = f"{' and '.join(kinds)} are given together" if kinds else "it names no logger"
            yield Problem(f"loggers[{i}]", what, f"give one of {', '.join(KINDS)}, such as {{wandb: {{}}}}, per entry")
            continue
        (kind,) = kinds
        if kind in first:
            what = f"loggers[{first[kind]}] is also a logger of this kind"
            yield Problem(f"loggers[{i}].{kind}", what, "keep one of them")
        first.setdefault(kind, i)
        if isinstance(entry[kind], dict) and _has_password(entry[kind].get(_ADDRESSES[kind])):
            what = "contains a user name or password before its host, which would be shown with the configuration"
            yield Problem(f"loggers[{i}].{kind}.{_ADDRESSES[kind]}", what, _PASSWORDS[kind])


def _has_password(url: Any) -> bool:
    try:
        return isinstance(url, str) and "@" in urlsplit(url).netloc
    except ValueError:  # an invalid address, on which the library fails with its own message
        return "@" in url
