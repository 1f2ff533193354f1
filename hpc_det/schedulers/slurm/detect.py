"""What Slurm tells, after sinfo(1), scontrol(1) and slurm.conf(5), versions 22.05 to 25.05."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_det.schedulers.scheduler import CommandError, Run, reading
from hpc_det.schedulers.site import FoundPool, Site
from hpc_det.schedulers.slurm.answers import parse_scontrol

# --exact: nodes that differ in anything stand on lines of their own, else sinfo shows the smallest of them.
SINFO = ("sinfo", "--exact", "--noheader", "--format=%R|%D|%c|%G")
CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("scontrol", "show", "partition", "--oneliner")
SRUN_HELP = ("srun", "--help")

_GPU = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:([0-9]+)")
# slurm.conf(5), PreemptMode. WITHIN and GANG only qualify the others.
_PREEMPT_MODES = {"REQUEUE": "requeue", "CANCEL": "cancel", "SUSPEND": "suspend", "OFF": "off"}
_UNBOUND = ("UNLIMITED", "INFINITE", "NONE", "N/A", "(null)", "")


@dataclass(frozen=True)
class NodeKind:
    """Some nodes of a partition that are alike."""

    nodes: int
    cpus: int
    gpus: Mapping[str, int]
    """Type -> GPUs on each node; "" where the site names no type."""


@reading("scontrol or sinfo")
def detect(run: Run) -> Site:
    """Asks Slurm. Raises CommandError where it does not answer."""
    config, nodes, partitions = (_whole(run(command), command[0]) for command in (CONFIG, SINFO, PARTITIONS))
    site = site_of(parse_config(config), parse_sinfo(nodes), parse_partitions(partitions), _has_pyxis(run))
    if not site.pools:
        raise CommandError("sinfo: no partition that you may use")
    return site


def _whole(output: str, command: str) -> str:
    """Raises CommandError where it ends within a line: `gpu:a100:16` may have lost its last digit."""
    if output and not output.endswith("\n"):
        raise CommandError(f"{command}: its answer is cut off; try again")
    return output


def parse_config(output: str) -> dict[str, str]:
    """`scontrol show config`: KEY = VALUE."""
    pairs = (line.split("=", 1) for line in output.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def parse_sinfo(output: str) -> dict[str, list[NodeKind]]:
    """The lines of SINFO by partition."""
    found: dict[str, list[NodeKind]] = {}
    for line in output.splitlines():
        if line.count("|") == 3:
            partition, nodes, cpus, gres = (word.strip() for word in line.split("|"))
            kinds = found.setdefault(partition, [])
            if int(nodes):
                kinds.append(NodeKind(int(nodes), int(cpus.rstrip("+")), parse_gres(gres)))
    return found


def parse_gres(gres: str) -> dict[str, int]:
    """GPUs by type in a text such as `gpu:a100:4(S:0-1),mps:400`, with the type "" where there is none."""
    found: Counter[str] = Counter()
    for kind, count in _GPU.findall(gres):
        found[kind] += int(count)
    return dict(found)


def parse_partitions(output: str) -> dict[str, dict[str, str]]:
    """`scontrol show partition --oneliner` by name."""
    partitions = map(parse_scontrol, output.splitlines())
    return {found["PartitionName"]: found for found in partitions if "PartitionName" in found}


def site_of(
    config: Mapping[str, str],
    nodes: Mapping[str, Sequence[NodeKind]],
    partitions: Mapping[str, Mapping[str, str]],
    has_pyxis: bool,
) -> Site:
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
        # The bound is the highest index plus one, slurm.conf(5); indices begin at 0. 0 forbids arrays.
        max_array_size=max(int(size), 1) if size.isdecimal() else None,
        gpu_flag=flag,
        gpu_flag_why=why,
        runtime="pyxis" if has_pyxis else None,
    )


def _pool(
    name: str, kinds: Sequence[NodeKind], partition: Mapping[str, str], config: Mapping[str, str], top: int
) -> FoundPool:
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
        gpu_type=max(usual.gpus, key=lambda kind: usual.gpus[kind]) if len(types) > 1 else None,
        max_nodes=max(min(nodes, int(bound)), 1) if bound.isdecimal() else nodes,
        max_time_limit=_bounded(partition.get("MaxTime", "")),
        preempt_mode=_preempt_mode(partition, config, top),
        grace_time_s=int(partition["GraceTime"]) if partition.get("GraceTime", "").isdecimal() else None,
        remark="" if len(kinds) == 1 else "its nodes differ: " + ", ".join(map(_described, kinds)),
    )


def _covers(kind: NodeKind, usual: NodeKind) -> bool:
    return all(kind.gpus.get(name, 0) >= count for name, count in usual.gpus.items())


def _described(kind: NodeKind) -> str:
    gpus = "".join(f", {count} {name or 'GPUs'}" for name, count in kind.gpus.items())
    return f"{kind.nodes} with {kind.cpus} CPUs{gpus}"


def _bounded(text: str) -> str | None:
    return None if text in _UNBOUND else text


def _preempt_mode(partition: Mapping[str, str], config: Mapping[str, str], top: int) -> str | None:
    """With preempt/partition_prio a partition of the highest tier preempts and is never preempted.

    With preempt/qos the QOS of both jobs decides, and `scontrol` tells only what holds where a QOS says nothing.
    """
    kind = config.get("PreemptType", "").removeprefix("preempt/")
    if kind in ("none", "(null)", ""):
        return "off"
    if kind == "partition_prio" and int(partition.get("PriorityTier", 1)) == top:
        return "off"
    said = partition.get("PreemptMode", "") if kind == "partition_prio" else config.get("PreemptMode", "")
    words = (said or config.get("PreemptMode", "")).split(",")
    return next((mode for word, mode in _PREEMPT_MODES.items() if word in words), None)


def _gpu_flag(select_type: str, version: str) -> tuple[str, str]:
    """--gpus-per-node is of 19.05, and of select/cons_tres alone: sbatch(1)."""
    if _numbers(version) < (19, 5):
        return "gres", f"Slurm {version} has no --gpus-per-node"
    if select_type and not select_type.endswith("cons_tres"):
        return "gres", f"{select_type} does not know --gpus-per-node"
    return "gpus-per-node", "or gres, where the site wants that"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2]) or (99,)


def _has_pyxis(run: Run) -> bool:
    """A plugin's flags stand in srun's own help."""
    try:
        return "--container-image" in run(SRUN_HELP)
    except CommandError:
        return False
