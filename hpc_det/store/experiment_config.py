"""The configuration of an experiment on disk: effective.json, what its owner has changed since, and masked copies.

experiments/12/effective.json  the effective configuration, as its workers and the command line read it
               about.json      {"name", "description", "labels", "archived"}, as far as somebody has changed them;
                               written by the command line alone; training does not depend on it
               masked/         copies of files with secrets, without the secrets, for colleagues
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_det.node.files import is_shared, make_folder
from hpc_det.node.json_files import DamagedFile, Shape, checked, parsed, read_map, write_json
from hpc_det.store.folders import ExperimentFolder

WHOLE: Shape = {
    "name": str,
    "searcher": {"name": str, "metric": str, "smaller_is_better": bool},
    "hyperparameters": dict,
    "checkpoint_storage": dict.fromkeys(("save_experiment_best", "save_trial_best", "save_trial_latest"), int),
}
"""What each reader needs; the schema of an experiment file says more."""


_OF_SEARCH: Shape = {"searcher": {"name": str}, "hyperparameters": dict, "reproducibility": dict}


def read_effective(experiment: ExperimentFolder) -> dict[str, Any] | None:
    """None where there is no such file. Secrets are masked for colleagues. Raises DamagedFile."""
    found = read_secrets(experiment.effective)
    return None if found is None else checked(found, WHOLE, experiment.effective)


def read_for_search(experiment: ExperimentFolder) -> dict[str, Any]:
    """As far as a search needs it. Raises DamagedFile, also where there is no such file."""
    return checked(read_secrets(experiment.effective), _OF_SEARCH, experiment.effective)


_KINDS: Shape = {"name": str, "description": str, "labels": list[str], "archived": bool}


@dataclass(frozen=True, kw_only=True)
class About:
    """What an experiment's owner says about it."""

    name: str
    description: str
    labels: tuple[str, ...]
    archived: bool
    """Lists leave it out, until it goes on."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "labels": list(self.labels)}


def read_about(experiment: ExperimentFolder, config: Mapping[str, Any]) -> About:
    """As it was submitted, by `config`, and changed since."""
    changed = _changed(experiment)
    return About(
        name=changed.get("name", config["name"]),
        description=changed.get("description", config.get("description", "")),
        labels=tuple(changed.get("labels", config.get("labels", ()))),
        archived=changed.get("archived", False),
    )


def write_about(experiment: ExperimentFolder, **changes: Any) -> None:
    """Of an About's fields those that are now different."""
    write_json(experiment.about, {**_changed(experiment), **changes})


def _changed(experiment: ExperimentFolder) -> dict[str, Any]:
    changed = read_map(experiment.about) or {}
    return checked(changed, {key: kind for key, kind in _KINDS.items() if key in changed}, experiment.about)


# --- files with secrets: for the owner alone; a shared experiment has copies in masked/, under the same names


def write_secrets(path: Path, data: Any, masked: Any) -> None:
    """`masked`: the same without the secrets."""
    write_json(path, data, private=True)
    if is_shared(path.parent):
        copy = _copy(path)
        make_folder(copy.parent)
        write_json(copy, masked)


def read_text(path: Path) -> str:
    """The file or, for whom it is not, its copy. Raises DamagedFile."""
    try:
        try:
            return path.read_text(encoding="utf-8")
        except PermissionError:
            return _copy(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path}: damaged: {error}") from None


def read_secrets(path: Path) -> Any | None:
    """The content of the file or, for whom it is not, of its copy; None where there is no such file.

    Raises DamagedFile.
    """
    try:
        return parsed(read_text(path), path)
    except FileNotFoundError:
        return None


def _copy(path: Path) -> Path:
    return ExperimentFolder(path.parent).masked / path.name
