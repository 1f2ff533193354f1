"""The default cluster profile. Every entry point calls `chosen_cluster`.

The first of these decides: the option `--cluster`, HPC_DET_CLUSTER, `default_cluster` in the site's site.yaml, the only
profile of the user and the site, this machine (`local`). Where Slurm or PBS is installed, `local` must be named: such a
machine may be a login node, on which nobody should train by accident.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.config.conf_files import find, group_files
from hpc_det.config.merge import Tree
from hpc_det.errors import UsageError
from hpc_det.store.site_settings import FILE, site_settings

VARIABLE = "HPC_DET_CLUSTER"
LOCAL = "local"
Which = Callable[[str], str | None]
"""A function that returns the path of a command on PATH; None if it is not found."""
# Slurm is first: it may bring wrappers named like the commands of PBS, which cannot print JSON.
COMMANDS = {"slurm": "sinfo", "pbs": "pbsnodes"}
"""The command whose presence shows that a scheduler is installed, by scheduler; the one to try first is first."""
_IN_WORDS = {"slurm": "Slurm", "pbs": "PBS"}


class ChosenCluster(NamedTuple):
    """A cluster profile, and why it is used."""

    name: str
    file: Path
    reason: str
    """The reason in a few words; empty if an option names the profile, and for `local` without any alternative."""

    def profile(self) -> Tree:
        """Return its content. Raises UsageError if that is not a map of YAML."""
        return _content(self.file)


def schedulers_here(which: Which) -> list[str]:
    """Return the schedulers whose commands are installed, the likelier first. Their daemons may not be running."""
    return [kind for kind, command in COMMANDS.items() if which(command)]


def chosen_cluster(named: str | None, env: Mapping[str, str], scheduler: str | None = None) -> ChosenCluster:
    """Return the cluster profile to use. `named`: the value of an option, or None.

    `scheduler`: the one that a launcher needs; profiles of others are not candidates, and the launcher for this machine
    needs no choice. Raises UsageError for a name without a profile, and if a profile must be named or written first.
    """
    if named is None and scheduler == LOCAL:
        named = LOCAL
    if named is not None:
        return ChosenCluster(named, find("cluster", named, env), "")
    if name := env.get(VARIABLE):
        return ChosenCluster(name, find("cluster", name, env, source=VARIABLE), f"set by {VARIABLE}")
    if default := site_settings(env).default_cluster:
        file = find("cluster", default.value, env, source=f"{default.file}: default_cluster")
        if scheduler is None or _scheduler_of(file) in (scheduler, None):
            return ChosenCluster(default.value, file, f"the default of the site, {default.file}")
    return _of_files(env, scheduler)


def _of_files(env: Mapping[str, str], scheduler: str | None) -> ChosenCluster:
    """Return the only profile of the user and the site, or that of this machine. Raises UsageError if neither may be
    used.
    """
    found = {name: file for name, file in own_profiles(env).items() if scheduler in (None, _scheduler_of(file))}
    here = schedulers_here(_which(env))
    may_be_login_node = bool(here) and not is_node_of_job(env)
    if len(found) == 1:
        (name, file), *_ = found.items()
        if not (may_be_login_node and _scheduler_of(file) == LOCAL):
            of_kind = f" for {_IN_WORDS[scheduler]}" if scheduler else ""
            return ChosenCluster(name, find("cluster", name, env), f"the only profile found{of_kind}, {file}")
    if scheduler or may_be_login_node or (here and found):
        raise UsageError(_undecided(found, here, scheduler))
    reason = ""
    if found:
        reason = f"none of {len(found)} profiles is chosen, and no scheduler is on PATH"
    elif here:
        reason = "no profile is found, and this is a node of a job"
    return ChosenCluster(LOCAL, find("cluster", LOCAL, env), reason)


def is_node_of_job(env: Mapping[str, str]) -> bool:
    """Return whether this process runs on a node that a scheduler has allocated, according to its environment."""
    # salloc sets SLURM_JOB_ID also in a shell on the login node.
    return "SLURMD_NODENAME" in env or "PBS_NODEFILE" in env


def own_profiles(env: Mapping[str, str]) -> dict[str, Path]:
    """Return the profiles of the user and of the site by name, without the examples that hpc_det comes with."""
    files = {name: found[0] for name, found in sorted(group_files("cluster", env).items())}
    return {name: file for name, (owner, file) in files.items() if owner != "hpc_det"}


def _scheduler_of(file: Path) -> Any:
    """Return the scheduler of a profile; None if the file is broken."""
    try:
        return _content(file).get("scheduler")
    except UsageError:
        return None


def _content(file: Path) -> Tree:
    from hpc_det.config.plain_yaml import load_yaml  # here: `job list` only asks which schedulers are installed

    return load_yaml(file)


def _which(env: Mapping[str, str]) -> Which:
    return lambda command: shutil.which(command, path=env.get("PATH"))


def _undecided(found: Mapping[str, Path], here: list[str], scheduler: str | None) -> str:
    """Return the message for profiles among which none can be chosen."""
    if scheduler:
        kind, where = _IN_WORDS[scheduler], f"this launcher needs a profile for {_IN_WORDS[scheduler]}"
    else:
        kind = " and ".join(_IN_WORDS[each] for each in here)
        where = f"{kind} is on PATH, so this may be a login node"
    local = "" if scheduler else ", or name this machine with `--cluster local` (`hpc-det run`: `cluster=local`)"
    if not found:
        return (
            f"cluster: {where}, and no profile is found; write one with `hpc-det cluster detect --name NAME --write`"
            f"{local}"
        )
    known = ", ".join(f"{name} ({file})" for name, file in found.items())
    name_it = "with hydra.launcher.cluster=NAME" if scheduler else "with --cluster NAME (`hpc-det run`: cluster=NAME)"
    if len(found) == 1:
        return f"cluster: {where}, and the only profile is for this machine: {known}; name it {name_it}"
    return (
        f"cluster: {where}, and none of {len(found)} profiles is chosen: {known}; name one {name_it}, or set a "
        f"default: {VARIABLE}=NAME for you, or `default_cluster: NAME` in {FILE} for the site"
    )
