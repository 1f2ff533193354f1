"""The configuration of an experiment on disk: the effective one, changes of its description, and masked copies.

experiments/12/effective.json  the effective configuration, which workers and the command line read
               about.json      {"name", "description", "labels", "archived"}, only those that were changed after the
                               submission; written by the command line; training does not depend on it
               masked/         copies of files with secrets, without the secrets, for members of the group
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
"""The keys that all readers need; the schema of experiment files has more."""


_OF_SEARCH: Shape = {"searcher": {"name": str}, "hyperparameters": dict, "reproducibility": dict}


def read_effective(experiment: ExperimentFolder) -> dict[str, Any] | None:
    """Return the effective configuration, or None if the file does not exist. Raises DamagedFile.

    Its secrets are masked if the user is not the owner.
    """
    found = read_secrets(experiment.effective)
    return None if found is None else checked(found, WHOLE, experiment.effective)


def read_for_search(experiment: ExperimentFolder) -> dict[str, Any]:
    """Return the effective configuration; only the keys of a search are checked. Raises DamagedFile."""
    return checked(read_secrets(experiment.effective), _OF_SEARCH, experiment.effective)


_KINDS: Shape = {"name": str, "description": str, "labels": list[str], "archived": bool}
"""The possible keys of about.json."""


@dataclass(frozen=True, kw_only=True)
class About:
    """The description of an experiment, which its owner can change at any time."""

    name: str
    description: str
    labels: tuple[str, ...]
    archived: bool
    """Whether listings omit it. Continuing the experiment sets this to False."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "labels": list(self.labels)}


def read_about(experiment: ExperimentFolder, config: Mapping[str, Any]) -> About:
    """Return the description in `config`, with the changes since the submission. Raises DamagedFile."""
    changed = _changed(experiment)
    return About(
        name=changed.get("name", config["name"]),
        description=changed.get("description", config.get("description", "")),
        labels=tuple(changed.get("labels", config.get("labels", ()))),
        archived=changed.get("archived", False),
    )


def write_about(experiment: ExperimentFolder, **changes: Any) -> None:
    """Change some fields of the description: `changes` are fields of About."""
    write_json(experiment.about, {**_changed(experiment), **changes})


def _changed(experiment: ExperimentFolder) -> dict[str, Any]:
    changed = read_map(experiment.about) or {}
    # The file may lack any of the keys, so only those that it has are checked
    return checked(changed, {key: kind for key, kind in _KINDS.items() if key in changed}, experiment.about)


# --- files with secrets, which only the owner can read; a shared experiment has copies in masked/ with the same names


def write_secrets(path: Path, data: Any, masked: Any) -> None:
    """Write `data` as JSON for the owner and, if the experiment is shared, `masked` for the group.

    `masked`: the same data without the secrets.
    """
    write_json(path, data, private=True)
    if is_shared(path.parent):
        copy = _copy(path)
        make_folder(copy.parent)
        write_json(copy, masked)


def read_text(path: Path) -> str:
    """Return the text of the file or, if this user may not read it, of its masked copy. Raises DamagedFile."""
    try:
        try:
            return path.read_text(encoding="utf-8")
        except PermissionError:
            return _copy(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path}: damaged: {error}") from None


def read_secrets(path: Path) -> Any | None:
    """Return the JSON content of the file or, if this user may not read it, of its masked copy.

    Returns None if the file does not exist. Raises DamagedFile.
    """
    try:
        return parsed(read_text(path), path)
    except FileNotFoundError:
        return None


def _copy(path: Path) -> Path:
    return ExperimentFolder(path.parent).masked / path.name
