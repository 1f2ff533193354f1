"""The slots of a profile for this machine that does not set them: its GPUs if they are enough, else CPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hpc_det.config.merge import Tree
from hpc_det.errors import UsageError, count
from hpc_det.node import gpus

CPU_RANKS = 2
"""Slots of a machine that trains on CPUs: the fewest with which a gang has peers."""


class LocalSlots(NamedTuple):
    """A profile with its slots, and what was found on this machine."""

    profile: Tree
    devices: str = ""
    """Description of the GPUs; empty if ranks train on CPUs, or if the profile sets its slots."""
    note: str = ""
    """Reason for training on CPUs although the machine may have GPUs; empty if none has to be shown."""


def with_local_slots(profile: Tree, slots_per_trial: int, env: Mapping[str, str]) -> LocalSlots:
    """Return the profile with `slots_per_node` and `slot_type`, if it has scheduler `local` and lacks one of them.

    Raises UsageError for a profile with GPUs if their driver does not answer.
    """
    given = {key: value for key, value in profile.items() if value is not None}
    if given.get("scheduler") != "local" or {"slots_per_node", "slot_type"} <= given.keys():
        return LocalSlots(profile)
    wanted, on_cpus = given.get("slot_type"), {"slots_per_node": CPU_RANKS, "slot_type": "cpu", **given}
    if wanted == "cpu":
        return LocalSlots(on_cpus)
    try:
        found = gpus.cuda_devices(env)
    except gpus.NvmlError as error:
        if wanted == "gpu":
            raise UsageError(f"cluster.slot_type: gpu: {error}") from None
        return LocalSlots(on_cpus, note=f"{error}; ranks train on CPUs")
    if not found:
        return LocalSlots(given if wanted == "gpu" else on_cpus)
    on_gpus = LocalSlots({"slots_per_node": len(found), "slot_type": "gpu", **given}, devices=in_words(found))
    if wanted == "gpu":
        return on_gpus
    if not torch_has_cuda():
        return LocalSlots(
            on_cpus,
            note=f"this machine has {in_words(found)}, but the installed torch is built without CUDA: ranks train on "
            "CPUs; install torch's CUDA build to train on GPUs",
        )
    # A trial for which neither suffices is refused, with the most slots that this machine has.
    if len(found) < slots_per_trial and len(found) <= CPU_RANKS:
        return LocalSlots(
            on_cpus,
            note=f"a trial has {count(slots_per_trial, 'slot')}, and this machine {in_words(found)}: ranks train on "
            f"CPUs; use resources.slots_per_trial={len(found)} or less to train on GPUs",
        )
    return on_gpus


def torch_has_cuda() -> bool:
    """Return False if the installed torch is a build for CPUs; True if it is not, or if that is unknown."""
    # torch/version.py is read as text: to import torch takes seconds.
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    with suppress(OSError):
        return not re.search(r"(?m)^cuda\b.*= None$", Path(spec.origin).with_name("version.py").read_text("utf-8"))
    return True


def in_words(found: Sequence[gpus.Device]) -> str:
    """Return the number and the models of GPUs, such as "2 GPUs, NVIDIA H200"."""
    models = dict.fromkeys(device.model for device in found if device.model)
    return ", ".join([count(len(found), "GPU"), *models])
