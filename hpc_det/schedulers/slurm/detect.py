"""Detection of a Slurm site, after sinfo(1), scontrol(1) and slurm.conf(5), versions 22.05 to 25.05."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_det.errors import count
from hpc_det.schedulers.scheduler import CommandError, Run, reading
from hpc_det.schedulers.site import FoundPool, Site
from hpc_det.schedulers.slurm.answers import parse_scontrol

# --exact prints one line for each kind of node; without it, sinfo merges kinds and prints the smallest values.
SINFO = ("sinfo", "--exact", "--noheader", "--format=%R|%D|%c|%G")
CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("scontrol", "show", "partition", "--oneliner")
SRUN_HELP = ("srun", "--help")

_GPU = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:([0-9]+)")
# slurm.conf(5), PreemptMode. WITHIN and GANG only modify the other modes.
_PREEMPT_MODES = {"REQUEUE": "requeue", "CANCEL": "cancel", "SUSPEND": "suspend", "OFF": "off"}
_UNBOUND = ("UNLIMITED", "INFINITE", "NONE", "N/A", "(null)", "")


@dataclass(frozen=True)
class NodeKind:
    """A group of identical nodes of a partition."""

    nodes: int
    cpus: int
    gpus: Mapping[str, int]
    """Number of GPUs on each node, by type; the type is "" if the site does not define one."""


@reading("scontrol or sinfo")
def detect(run: Run) -> Site:
    """Query Slurm and return its site. Raises CommandError if Slurm does not answer or no partition is usable."""
    config, nodes, partitions = (_whole(run(command), command[0]) for command in (CONFIG, SINFO, PARTITIONS))
    site = site_of(parse_config(config), parse_sinfo(nodes), parse_partitions(partitions), _has_pyxis(run))
    if not site.pools:
        raise CommandError("sinfo: it lists no partition that you may use")
    return site


def _whole(output: str, command: str) -> str:
    """Return `output`. Raises CommandError if it does not end with a newline."""
    # An answer that ends within a line may have lost digits: `gpu:a100:16` would become `gpu:a100:1`.
    if output and not output.endswith("\n"):
        raise CommandError(f"{command}: its answer is incomplete; try again")
    return output


def parse_config(output: str) -> dict[str, str]:
    """Return the KEY = VALUE pairs of `scontrol show config`."""
    pairs = (line.split("=", 1) for line in output.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def parse_sinfo(output: str) -> dict[str, list[NodeKind]]:
    """Return the kinds of nodes of each partition, from the output of SINFO."""
    found: dict[str, list[NodeKind]] = {}
    for line in output.splitlines():
        if line.count("|") == 3:
            partition, nodes, cpus, gres = (word.strip() for word in line.split("|"))
            kinds = found.setdefault(partition, [])
            if int(nodes):
                kinds.append(NodeKind(int(nodes), int(cpus.rstrip("+")), parse_gres(gres)))
    return found


def parse_gres(gres: str) -> dict[str, int]:
    """Return the number of GPUs by type in a text such as `gpu:a100:4(S:0-1),mps:400`; "" for GPUs without a type."""
    found: Counter[str] = Counter()
    for kind, number in _GPU.findall(gres):
        found[kind] += int(number)
    return dict(found)


def parse_partitions(output: str) -> dict[str, dict[str, str]]:
    """Return the KEY=VALUE pairs of each partition, from the output of `scontrol show partition --oneliner`."""
    partitions = map(parse_scontrol, output.splitlines())
    return {found["PartitionName"]: found for found in partitions if "PartitionName" in found}


def site_of(
    config: Mapping[str, str],
    nodes: Mapping[str, Sequence[NodeKind]],
    partitions: Mapping[str, Mapping[str, str]],
    has_pyxis: bool,
) -> Site:
    """Return the site that the parsed answers of scontrol, sinfo and srun describe."""
    version = config.get("SLURM_VERSION", "")
    flag, why = _gpu_flag(config.get("SelectType", ""), version)
    top = max((int(partition.get("PriorityTier", 1)) for partition in partitions.values()), default=1)
    size = config.get("MaxArraySize", "")
    return Site(
        scheduler="slurm",
        version=f"Slurm {version}",
        name=config.get("ClusterName", "slurm"),
        pools=tuple(
            _pool(name, kinds, partitions.get(name, {}), config, top) for name, kinds in nodes.items() if kinds
        ),
        # MaxArraySize is the highest index plus one (slurm.conf(5)), and indices begin at 0. 0 disables arrays.
        max_array_size=max(int(size), 1) if size.isdecimal() else None,
        gpu_flag=flag,
        gpu_flag_why=why,
        runtime="pyxis" if has_pyxis else None,
    )


def _pool(
    name: str, kinds: Sequence[NodeKind], partition: Mapping[str, str], config: Mapping[str, str], top: int
) -> FoundPool:
    """Return the pool of a partition, with its usual node: one with GPUs if there are any, of the commonest kind."""
    usual = max(kinds, key=lambda kind: (bool(kind.gpus), kind.nodes, sum(kind.gpus.values())))
    alike = [kind for kind in kinds if kind.cpus >= usual.cpus and _covers(kind, usual)]
    gpus = max(usual.gpus.values(), default=0)
    types = {kind for each in kinds for kind in each.gpus} - {""}
    bound = partition.get("MaxNodes", "")
    nodes = sum(kind.nodes for kind in alike)
    return FoundPool(
        name=name,
        default=partition.get("Default") == "YES",
        slots_per_node=gpus or usual.cpus,
        slot_type="gpu" if gpus else "cpu",
        cpus_per_slot=max(usual.cpus // gpus, 1) if gpus else 1,
        max_cpus_per_node=max(kind.cpus for kind in alike),
        max_memory_per_node=f"{limit}M" if (limit := partition.get("MaxMemPerNode", "")).isdecimal() else None,
        gpu_type=max(usual.gpus, key=lambda kind: usual.gpus[kind]) if len(types) > 1 else None,
        max_nodes=max(min(nodes, int(bound)), 1) if bound.isdecimal() else nodes,
        max_time_limit=_bounded(partition.get("MaxTime", "")),
        preempt_mode=_preempt_mode(partition, config, top),
        grace_time_s=int(partition["GraceTime"]) if partition.get("GraceTime", "").isdecimal() else None,
        remark="" if len(kinds) == 1 else "nodes differ: " + ", ".join(map(_described, kinds)),
    )


def _covers(kind: NodeKind, usual: NodeKind) -> bool:
    """Return whether nodes of `kind` have at least the GPUs of `usual`."""
    return all(kind.gpus.get(name, 0) >= count for name, count in usual.gpus.items())


def _described(kind: NodeKind) -> str:
    gpus = "".join(f", {number} {name}" if name else f", {count(number, 'GPU')}" for name, number in kind.gpus.items())
    return f"{kind.nodes} with {count(kind.cpus, 'CPU')}{gpus}"


def _bounded(text: str) -> str | None:
    """Return the limit, or None if the text means that there is none."""
    return None if text in _UNBOUND else text


def _preempt_mode(partition: Mapping[str, str], config: Mapping[str, str], top: int) -> str | None:
    """Return how jobs of the partition are preempted; None if Slurm's configuration does not determine it."""
    kind = config.get("PreemptType", "").removeprefix("preempt/")
    if kind in ("none", "(null)", ""):
        return "off"
    # Partitions of the highest tier preempt others and are never preempted.
    if kind == "partition_prio" and int(partition.get("PriorityTier", 1)) == top:
        return "off"
    # With preempt/qos, the QOS of both jobs decides; scontrol shows only the mode for a QOS that sets none.
    said = partition.get("PreemptMode", "") if kind == "partition_prio" else config.get("PreemptMode", "")
    words = (said or config.get("PreemptMode", "")).split(",")
    return next((mode for word, mode in _PREEMPT_MODES.items() if word in words), None)


def _gpu_flag(select_type: str, version: str) -> tuple[str, str]:
    """Return the form of the flag that requests GPUs, and the reason, which is written into the profile."""
    # sbatch(1): --gpus-per-node exists since 19.05, and only with select/cons_tres.
    if _numbers(version) < (19, 5):
        return "gres", f"Slurm {version} has no --gpus-per-node"
    if select_type and not select_type.endswith("cons_tres"):
        return "gres", f"{select_type} does not support --gpus-per-node"
    return "gpus-per-node", "or gres, if the site requires it"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2]) or (99,)


def _has_pyxis(run: Run) -> bool:
    """Return whether srun has the pyxis plugin: the flags of a plugin are in the output of `srun --help`."""
    try:
        return "--container-image" in run(SRUN_HELP)
    except CommandError:
        return False
