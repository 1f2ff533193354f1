"""A site as its scheduler tells of it, and the profile that follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class FoundPool:
    """A partition or queue. None: the scheduler does not say, or sets no bound."""

    name: str
    default: bool = False
    slots_per_node: int | None = None
    slot_type: str | None = None
    cpus_per_slot: int | None = None
    gpu_type: str | None = None
    max_nodes: int | None = None
    max_time_limit: str | None = None
    preempt_mode: str | None = None
    grace_time_s: int | None = None
    remark: str = ""
    """What a person should know of it."""


@dataclass(frozen=True, kw_only=True)
class Site:
    scheduler: str
    version: str
    name: str
    pools: tuple[FoundPool, ...]
    """At least one."""
    max_array_size: int | None
    start_agents_with: str | None = None
    gpu_flag: str | None = None
    gpu_flag_why: str = ""
    runtime: str | None = None

    @property
    def usual(self) -> FoundPool:
        """The default pool, or the first."""
        return next((pool for pool in self.pools if pool.default), self.pools[0])


def to_yaml(site: Site, name: str) -> str:
    """A profile called `name` with all that was found, commented, for a person to complete."""
    return "".join(f"{line}\n" for line in _lines(site, name))


def _lines(site: Site, name: str) -> Iterator[str]:
    usual = site.usual
    yield f"# Written by `hpc-det cluster detect`, which asked {site.version}. Check it, and complete it."
    yield f"name: {_value(name)}"
    yield f"scheduler: {site.scheduler}"
    yield ""
    yield f"# Nodes: as in {usual.name!r}, {'the default pool' if usual.default else 'the first pool'}."
    yield f"slots_per_node: {usual.slots_per_node or 1}"
    yield f"slot_type: {usual.slot_type or 'cpu'}"
    yield f"cpus_per_slot: {usual.cpus_per_slot or 1}"
    if site.gpu_flag:
        yield f"gpu_flag: {site.gpu_flag}  # {site.gpu_flag_why}"
    if site.start_agents_with:
        yield f"start_agents_with: {site.start_agents_with}"
    if site.max_array_size is not None:
        yield f"max_array_size: {site.max_array_size}"
    yield ""
    yield "# What each pool has of its own. `default` is where jobs go that name none."
    yield "pools:"
    for pool in site.pools:
        yield from _pool(pool)
    yield ""
    yield "containers:"
    yield f"  runtime: {_value(site.runtime)}  # apptainer, podman or pyxis, for experiments that name an image"
    yield ""
    yield "# What no scheduler tells:"
    yield "# account: physics            # who pays"
    yield '# time_limit: "04:00:00"      # where an experiment sets none'
    yield "# scratch: /scratch/$USER     # a folder of each node's own, for $TMPDIR"
    yield "# modules: [cuda/12.4]        # loaded in the job"
    yield "# setup: [ulimit -n 65536]    # shell lines, run in the job"
    if site.scheduler == "slurm":
        yield "# srun_args: [--mpi=pmix]"


def _pool(pool: FoundPool) -> Iterator[str]:
    found = {field.name: getattr(pool, field.name) for field in fields(pool) if field.name not in ("name", "remark")}
    said = {key: value for key, value in found.items() if value is not None and value is not False}
    yield f"  {_value(pool.name)}:" + ("" if said else " {}") + (f"  # {pool.remark}" if pool.remark else "")
    yield from (f"    {key}: {_value(value)}" for key, value in said.items())


def _value(value: str | int | None) -> str:
    """JSON is YAML, and quotes keep a text such as 1:30:00 or `on` a text."""
    return json.dumps(value, ensure_ascii=False)
