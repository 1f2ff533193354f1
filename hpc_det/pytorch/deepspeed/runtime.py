"""Prepare a rank for DeepSpeed engines, and explain DeepSpeed's errors by the keys of its configuration."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.accelerator import real_accelerator
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.utils import groups
from pydantic import ValidationError
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError, shown
from hpc_det.node.network import limit_look_ups
from hpc_det.pytorch.deepspeed.compilation import report_compilations

# As Determined does: epochs and validations of a RepeatingLoader have the length of the loader inside.
RepeatingLoader.__len__ = lambda loader: len(loader.loader)

_DEPRECATED = "all_gather_into_tensor|reduce_scatter_tensor"


def prepare(distributed: Distributed) -> None:
    """Choose the accelerator and the process group, and disable the compiler, after `distributed.start()`.

    It may be called again after a group has ended. A single rank without a launcher gets its own process group, which
    DeepSpeed needs; `Distributed.stop` ends it.
    """
    _choose_accelerator(distributed.device.type)
    report_compilations()
    # DeepSpeed itself makes these calls, on every rank: a user cannot change them.
    warnings.filterwarnings("ignore", rf"`torch\.distributed\.({_DEPRECATED})` is deprecated", FutureWarning)
    # This op serves reductions in inference only. Otherwise the first init_distributed would build it, which takes a
    # minute, and fails without ninja. The table is created here, because at its first access DeepSpeed would fill it by
    # trying the linker for each op, whose errors every rank would print (deepspeed/ops/__init__.py).
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    _describe(distributed)
    if not dist.is_initialized():
        _start_alone(distributed)
    _forget_ended_groups()
    deepspeed.init_distributed(auto_mpi_discovery=False)


def _choose_accelerator(kind: str) -> None:
    """Make DeepSpeed use the accelerator `kind`: cuda or cpu.

    The process from which this one was forked may have chosen another.
    """
    if real_accelerator.get_accelerator().device_name() != kind:
        os.environ["DS_ACCELERATOR"] = kind
        real_accelerator.ds_accelerator = None
        real_accelerator.get_accelerator()


def _describe(distributed: Distributed) -> None:
    """Set torchrun's variables unless a launcher has set them: engines read their rank there."""
    ours = {
        "RANK": distributed.rank,
        "WORLD_SIZE": distributed.size,
        "LOCAL_RANK": distributed.local_rank,
        "LOCAL_WORLD_SIZE": distributed.local_size,
    }
    for name, number in ours.items():
        os.environ.setdefault(name, str(number))


def _start_alone(distributed: Distributed) -> None:
    """Make a process group of this rank alone, with a store in memory instead of at a TCP port."""
    limit_look_ups(os.environ)
    backend = "cpu:gloo,cuda:nccl" if distributed.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _forget_ended_groups() -> None:
    """Forget DeepSpeed's groups, which it creates once per process, after the group that contains them has ended."""
    if groups._WORLD_GROUP not in (None, *dist.distributed_c10d._world.pg_map):
        groups._release_process_group_references()


# --- errors of a config that cannot work


_BATCH_SIZES = (
    "set two of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps, and DeepSpeed works "
    "out the third"
)
_WORDS = {
    r"Check batch related parameters.* (?P<whole>\S+) != (?P<micro>\S+) \* (?P<steps>\S+) \* (?P<size>\S+)": (
        "train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} "
        "x data-parallel size {size}, which follows from resources.slots_per_trial; change one of them, or "
        + _BATCH_SIZES
    ),
    r"Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided": (
        "neither train_batch_size nor train_micro_batch_size_per_gpu; " + _BATCH_SIZES
    ),
    r"Micro batch size per gpu: (?P<micro>\S+) has to be greater than 0": (
        "train_micro_batch_size_per_gpu comes to {micro}; train_batch_size must be at least "
        "gradient_accumulation_steps x data-parallel size, which follows from resources.slots_per_trial"
    ),
    r"Train batch size: (?P<whole>\S+) has to be greater than 0": (
        "train_batch_size comes to {whole}; use at least 1 for each of train_batch_size, "
        "train_micro_batch_size_per_gpu and gradient_accumulation_steps"
    ),
    r"Gradient accumulation steps: (?P<steps>\S+) has to be greater than 0": (
        "gradient_accumulation_steps comes to {steps}; train_batch_size must be at least train_micro_batch_size_per_gpu"
    ),
    r"Type fp16 is not supported on your device": (
        "fp16.enabled: this device cannot compute in fp16, as most CPUs cannot; use bf16.enabled instead, or neither"
    ),
    r"Type bf16 is not supported on your device": (
        "bf16.enabled: this device cannot compute in bf16; use fp16.enabled instead, or neither"
    ),
    r"ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism": (
        "zero_optimization.stage: 2 and 3 do not go with a PipelineModule; use 1 or 0"
    ),
    r"num_stages \((?P<stages>\d+)\) must divide distributed world size \((?P<size>\d+)\)": (
        "num_stages of a PipelineModule: {stages} stages do not divide world size {size}; set "
        "resources.slots_per_trial to a multiple of {stages} (--local has one slot)"
    ),
    r"Unable to JIT load the (?P<op>\S+) op": (
        "DeepSpeed's op {op} would have to be compiled, for which this machine lacks what it takes (ninja on PATH, a "
        'compiler); give "torch_adam": true in optimizer.params, or an optimizer of torch.optim to '
        "deepspeed.initialize, and none is needed"
    ),
    r"You are using an untested ZeRO Optimizer": (
        "ZeRO with an optimizer that DeepSpeed has not tested it with, which Adam and AdamW are not; use one of those, "
        'or add "zero_allow_untested_optimizer": true'
    ),
    r"You are using ZeRO-Offload with a client provided optimizer": (
        "zero_optimization.offload_optimizer with an optimizer given to deepspeed.initialize; name it in the section "
        'optimizer instead (with "torch_adam": true nothing is compiled), or add "zero_force_ds_cpu_optimizer": false'
    ),
    r"zero stage (?P<stage>\S+) requires an optimizer": (
        "zero_optimization.stage: {stage} shares out an optimizer, and there is none; give one to "
        "deepspeed.initialize, or add the section optimizer"
    ),
    r"Expected a string path to an existing deepspeed config.*Received: (?P<map>{.*)": (
        "{map} is a mapping but not a dict; give deepspeed.initialize a plain dict, for example "
        "overwrite_deepspeed_config(config, {{}})"
    ),
    r"Expected a string path to an existing deepspeed config.*Received: (?P<path>.*)": (
        "no file {path}; give deepspeed.initialize a dict, or a path that is there"
    ),
}
"""Patterns of DeepSpeed's messages (0.19.8) and our explanations; a test provokes each."""


@contextmanager
def explained() -> Iterator[None]:
    """Raise errors of DeepSpeed that a user can fix as UsageError, within the block."""
    try:
        yield
    except Exception as error:
        if ours := in_our_words(error):
            raise ours from error
        raise


def in_our_words(error: BaseException) -> UsageError | None:
    """Return the explanation of an error of DeepSpeed for the user; None if its own message is better."""
    if isinstance(error, ValidationError):
        return _of_section(error)
    if isinstance(error, TypeError) and _is_about_batch_sizes(error):
        return UsageError(
            f'deepspeed config: a batch size is not a number; only Transformers resolves "auto"; {_BATCH_SIZES}'
        )
    for pattern, words in _WORDS.items():
        if found := re.search(pattern, str(error), re.DOTALL):
            return UsageError(f"deepspeed config: {words.format(**found.groupdict())}")
    return None


def _of_section(error: ValidationError) -> UsageError | None:
    if not error.title.startswith("DeepSpeed"):
        return None
    return UsageError(
        [
            f"deepspeed config: {'.'.join(map(str, one['loc']))}: {shown(one['input'])}: {one['msg']} ({error.title})"
            for one in error.errors()
        ]
    )


def _is_about_batch_sizes(error: TypeError) -> bool:
    """Return whether the error comes from DeepSpeed's computation of batch sizes, which expects numbers."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    return any(
        frame.filename.endswith("deepspeed/runtime/config.py") and "_batch_" in frame.name for frame in innermost
    )
