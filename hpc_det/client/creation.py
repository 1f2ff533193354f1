"""Create experiments: from a configuration to jobs in the queue."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from hpc_det.config.request import Request, from_file, from_tree, with_includes
from hpc_det.errors import say
from hpc_det.plan.effective import Effective
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.group import Group
from hpc_det.submit.submission import prepare, submit

Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]
"""A YAML file of an experiment, or its content."""
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
"""Keys that override those of a configuration: ["a.b=value"] with YAML values, or {"a.b": value}."""


def request_of(
    config: Config,
    context_dir: str | os.PathLike[str] | None,
    *,
    cluster: str | None,
    template: str | None,
    includes: Sequence[str | os.PathLike[str]],
    overrides: Overrides,
) -> Request:
    """Return the layers of the configuration. Raises UsageError if a file cannot be read or a name is unknown."""
    context, changed = (Path(context_dir) if context_dir else None), as_texts(overrides)
    if isinstance(config, Mapping):
        request = from_tree(dict(config), context, changed, template, cluster, os.environ)
    else:
        request = from_file(Path(config), context, changed, template, cluster, os.environ)
    return with_includes(request, [Path(path) for path in includes])


def as_texts(overrides: Overrides) -> list[str]:
    """Return the overrides as `a.b=value`."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    # JSON is YAML, and keeps the types of the values: the text "1" remains a text
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in overrides.items()]


def job_scripts(found: Effective, store: ExperimentStore) -> list[str]:
    """Return the job scripts that a submission would use, byte for byte, without writing or submitting anything.

    There are several if the trials exceed the cluster's `max_array_size`.
    """
    return [*prepare(found, store.folder(store.next_id())).jobs.scripts.values()]


def submit_new(
    found: Effective, store: ExperimentStore, *, group: Group | None = None, is_paused: bool = False
) -> ExperimentFolder:
    """Create an experiment and submit its jobs; print notes about the access of the `group` on stderr.

    `is_paused`: jobs are submitted only when the experiment is activated.
    """
    folder = submit(found, store, group=group, paused_by=getpass.getuser() if is_paused else None)
    if group:
        _say_shared(folder, group)
    return folder


def say_notes(found: Effective) -> None:
    """Print the choice of the cluster and the notes of the configuration on stderr."""
    if found.choice:
        say(f"cluster: {found.choice}")
    for note in found.notes:  # not on stdout, so that the output of a dry run remains a script
        say(f"note: {note}")


def _say_shared(experiment: ExperimentFolder, group: Group) -> None:
    """Print on stderr the group that may read the experiment, its ID for them, and what prevents their access."""
    say(f"shared with group {group.name!r}, as {experiment.root()}:{experiment.id}")
    places = filter(None, (experiment.path, experiment.checkpoints_elsewhere()))
    for problem in dict.fromkeys(problem for place in places for problem in group.obstacles(place)):
        say(f"note: {problem}")


@contextmanager
def private_files() -> Iterator[None]:
    """Create files that only this user can read, as commands do. The umask of the whole process changes meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
