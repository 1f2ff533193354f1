"""Checks of cluster profiles against the site: of the one that --cluster names, or of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hpc_det.config.cluster import Cluster
from hpc_det.config.cluster_choice import Which, chosen_cluster, own_profiles
from hpc_det.config.conf_files import find
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.doctor import Finding, slurm
from hpc_det.errors import UsageError, count, nearest
from hpc_det.plan.effective import valid_profile
from hpc_det.plan.planner import resume_mode
from hpc_det.plan.pool import cluster_notes
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.site import FoundPool, Site
from hpc_det.store.site_settings import site_settings

SUBJECT = "profiles"
WAYS = {
    "requeue": "the job goes back into the queue with the same id",
    "successor": "the next job waits in the queue while one runs, and starts about 1 s after it",
    "resubmit": "a job that ends submits the next one",
    "chain": "several jobs wait behind the first from the start",
}
"""How a trial resumes in each mode of `resume`, as `plan.planner.resume_mode` returns it."""


class Profile(NamedTuple):
    """A valid profile, and the subject of its findings."""

    subject: str
    cluster: Cluster


def read(name: str | None, env: Mapping[str, str], scheduler: str | None) -> Iterator[Profile | Finding]:
    """Yield the profiles to check: the one with this name, or all of the user and the site; a Finding for invalid ones.

    Raises UsageError if the name does not exist.
    """
    if name:
        yield _read(name, find("cluster", name, env))
        return
    found = [_read(name, file) for name, file in own_profiles(env).items()]
    yield from found
    if scheduler and not any(isinstance(each, Finding) or each.cluster.scheduler == scheduler for each in found):
        yield Finding(
            SUBJECT, "note", "none of your profiles is for this scheduler", "hpc-det cluster detect --name NAME --write"
        )


def default(env: Mapping[str, str]) -> Finding:
    """Return a finding on the profile of commands without --cluster. Raises UsageError if the site's settings are
    wrong.
    """
    site_settings(env)
    try:
        chosen = chosen_cluster(None, env)
    except UsageError as error:
        problem, _, remedy = str(error).partition("; ")
        return Finding(SUBJECT, "note", problem, remedy or "name a profile with --cluster")
    return Finding(SUBJECT, "ok", f"without --cluster: {chosen.name} ({chosen.reason or 'this machine'})")


def _read(name: str, file: Path) -> Profile | Finding:
    subject = f"profile {name}"
    try:
        return Profile(subject, valid_profile(load_yaml(file)))
    except UsageError as error:
        return Finding(subject, "problem", "; ".join(error.problems), f"edit {file}")


def without_any(site: Site, ask: Run) -> Iterator[Finding]:
    """Yield the findings for a profile as `hpc-det cluster detect` would write it."""
    usual = site.usual
    cluster = Cluster.model_validate(
        {
            "name": site.name,
            "scheduler": site.scheduler,
            "slots_per_node": usual.slots_per_node or 1,
            "slot_type": usual.slot_type or "cpu",
            "cpus_per_slot": usual.cpus_per_slot or 1,
            "gpu_flag": site.gpu_flag or "gpus-per-node",
        }
    )
    detected = Profile(SUBJECT, cluster)
    yield _resume_mode(detected)
    if site.scheduler == "slurm":
        yield _submission(detected, ask)


def findings(
    profile: Profile, site: Site | None, ask: Run, which: Which, *, is_named: bool = False
) -> Iterator[Finding]:
    """Yield the findings for one profile.

    `site`: the description by the scheduler of this machine; None: this machine has none, or it does not answer.
    `is_named`: the user has named the profile.
    """
    subject, cluster = profile
    yield Finding(subject, "ok", f"valid, for {_scheduler_in_words(cluster)}")
    yield from _container(profile, site, which)
    if not cluster.has_queue:
        return
    yield _resume_mode(profile)
    if site is None or site.scheduler != cluster.scheduler:
        message = f"{_scheduler_in_words(cluster)} does not answer here"
        yield Finding(subject, "problem" if is_named else "note", message, "run this on a login node of its cluster")
        return
    yield from _pools(profile, site)
    yield from _settings(profile, site)
    if cluster.scheduler == "slurm":
        yield _submission(profile, ask)


def _scheduler_in_words(cluster: Cluster) -> str:
    return {"slurm": "Slurm", "pbs": "PBS"}.get(cluster.scheduler, "this machine")


def _resume_mode(profile: Profile) -> Finding:
    """Return a finding on how trials resume after a preemption or time limit, with and without job arrays."""
    cluster = profile.cluster
    alone, in_array = (resume_mode(cluster, in_arrays=in_arrays) for in_arrays in (False, True))
    message = f"resume: {cluster.resume} takes {alone}: {WAYS[alone]}"
    message += f"; in arrays {in_array}" if in_array != alone else ""
    if cluster.scheduler == "pbs" and "requeue" in (alone, in_array):
        return Finding(
            profile.subject,
            "note",
            f"{message}; PBS does not let users requeue a job after its time limit",
            "set resume to successor, resubmit or chain, and nodes_can_submit to what is true of this site",
        )
    return Finding(profile.subject, "ok", message)


def _pools(profile: Profile, site: Site) -> Iterator[Finding]:
    """Yield the findings on each pool of the profile: whether it exists, its slots and its preemption."""
    subject, cluster = profile
    found = {pool.name: pool for pool in site.pools}
    named = list(dict.fromkeys([*cluster.pools, *filter(None, [cluster.resource_pool])]))
    for name in named or [site.usual.name]:  # without pools in the profile, jobs go to the site's usual one
        if name in found:
            yield from _pool(profile, name if named else None, found[name])
        else:
            hint = nearest(name, found) or f"known: {', '.join(found)}"
            yield Finding(subject, "problem", f"pool {name} does not exist on this site, or is closed to you", hint)


def _pool(profile: Profile, name: str | None, found: FoundPool) -> Iterator[Finding]:
    subject, cluster = profile
    there = cluster.in_pool(name)
    yield _slots(subject, there, found)
    for note in cluster_notes(cluster, name):
        yield Finding(subject, "note", note, "leave checkpoint_interval: auto, or ask the site for a grace time")
    if found.preempt_mode not in (None, "off", there.preempt_mode):
        said = there.preempt_mode or "nothing"
        yield Finding(
            subject,
            "note",
            f"pool {found.name} preempts by {found.preempt_mode}, and the profile says {said}",
            f"set preempt_mode: {found.preempt_mode} and grace_time_s: {found.grace_time_s} in the profile",
        )


def _slots(subject: str, there: Cluster, found: FoundPool) -> Finding:
    """Return a finding on the GPUs of a node or, without GPUs, its CPUs: in the profile and in the pool."""
    if there.slot_type == "gpu":
        wanted, kind, has = there.slots_per_node, "GPU", found.slots_per_node if found.slot_type == "gpu" else 0
    else:
        wanted, kind = there.slots_per_node * there.cpus_per_slot, "CPU"
        has = (found.slots_per_node or 1) * (found.cpus_per_slot or 1)
    message = f"pool {found.name}: the profile takes {count(wanted, kind)} of a node, and nodes have {has}"
    if has is None or wanted == has:  # None: the scheduler does not report it
        return Finding(subject, "ok", message)
    remedy = f"set slots_per_node to what nodes have{'' if kind == 'GPU' else ', divided by cpus_per_slot'}"
    if wanted > has and not found.remark:  # a remark: the nodes of the pool differ
        return Finding(subject, "problem", f"{message}: no job would ever start", remedy)
    return Finding(subject, "note", f"{message}{f' ({found.remark})' if found.remark else ''}", remedy)


def _settings(profile: Profile, site: Site) -> Iterator[Finding]:
    subject, cluster = profile
    if site.max_array_size and cluster.max_array_size > site.max_array_size:
        yield Finding(
            subject,
            "problem",
            f"max_array_size is {cluster.max_array_size}, but the site allows arrays of "
            f"{count(site.max_array_size, 'job')}",
            f"set max_array_size: {site.max_array_size}",
        )
    if site.gpu_flag == "gres" and cluster.slot_type == "gpu" and cluster.gpu_flag != "gres":
        yield Finding(
            subject, "problem", f"gpu_flag is {cluster.gpu_flag}, and {site.gpu_flag_why}", "set gpu_flag: gres"
        )


def _container(profile: Profile, site: Site | None, which: Which) -> Iterator[Finding]:
    runtime = profile.cluster.containers.runtime
    if runtime == "pyxis" and site and site.runtime != "pyxis":
        yield Finding(
            profile.subject, "problem", "srun has no pyxis", "set containers.runtime to apptainer, podman or null"
        )
    elif runtime and runtime != "pyxis" and not which(runtime):
        yield Finding(
            profile.subject,
            "note",
            f"{runtime} is not on this PATH",
            f"make sure that jobs find it: add its module to `modules`, or check with `which {runtime}` in a job",
        )


def _submission(profile: Profile, ask: Run) -> Finding:
    """Return a finding on whether Slurm would accept a job of this profile, for instance its account and limits."""
    pool = profile.cluster.usual_pool
    where = f"partition {pool}" if pool else "the default partition"
    try:
        ask(slurm.try_submission(profile.cluster, pool))
    except CommandError as error:
        return Finding(
            profile.subject,
            "problem",
            f"a job of one node in {where} would be rejected: {error}",
            "correct account, qos, time_limit, resource_pool or other keys in the profile as the site requires",
        )
    return Finding(profile.subject, "ok", f"a job of one node in {where} would be taken (sbatch --test-only)")
