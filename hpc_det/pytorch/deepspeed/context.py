"""The context of a DeepSpeedTrial: it registers engines and answers questions about the run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from deepspeed import DeepSpeedEngine, PipelineEngine

from hpc_det.config.plain_containers import plain_containers
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError, count, shown
from hpc_det.pytorch.deepspeed.checkpoint_engine import ShardFiles
from hpc_det.pytorch.deepspeed.runtime import prepare
from hpc_det.pytorch.strategies.strategy import (
    ModelParallelUnit,
    checked_unit,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)
from hpc_det.pytorch.trial.trial_context import TrialContext
from hpc_det.store.folders import TrialFolder

Engine = TypeVar("Engine", bound=DeepSpeedEngine)

_ENGINES_OWN: dict[str, tuple[object, str]] = {
    "aggregation_frequency": (1, "set gradient_accumulation_steps of the deepspeed config"),
    "average_aggregated_gradients": (True, "leave it out: engines average the gradients that they accumulate"),
    "gradient_compression": (False, "set communication_data_type of the deepspeed config to fp16"),
    "mixed_precision": ("O0", "set fp16.enabled or bf16.enabled of the deepspeed config"),
    "tensor_fusion_threshold": (None, "set zero_optimization.reduce_bucket_size of the deepspeed config"),
    "auto_tune_tensor_fusion": (False, "set zero_optimization.reduce_bucket_size of the deepspeed config"),
}
"""Keys of `optimizations` that engines configure themselves: the default, and the key of the engine."""


class DeepSpeedTrialContext(TrialContext):
    """The context of a DeepSpeedTrial, which registers the engines of deepspeed.initialize.

    Batches reach the trial as they are loaded; move them with `to_device`.
    """

    own_loaders_allowed_by = "context.disable_dataset_reproducibility_checks"

    def __init__(self, spec: dict[str, Any], distributed: Distributed, folder: TrialFolder | None = None) -> None:
        super().__init__(spec, distributed, folder)
        prepare(distributed)
        self.to_device_automatically = False
        self.models: list[DeepSpeedEngine] = []
        """Engines, in the order of `wrap_model_engine`."""
        self.mpu: ModelParallelUnit = make_data_parallel_mpu(distributed)
        """This rank's part of the data and the model: the first engine's, or the argument of `set_mpu`."""
        self.shards = ShardFiles()
        """Writes and reads the checkpoints of all engines."""
        self.settled: list[torch.nn.Parameter] = []
        """Parameters that were frozen at deepspeed.initialize, and that their engine's optimizer would never train.

        Optimizers with ZeRO, fp16 or bf16 know only the parameters that required gradients then.
        """
        self._mpu_is_given = False
        self._accumulates = True

    # --- wrapping

    def wrap_model_engine(self, model: Engine) -> Engine:
        """Register an engine and return it unchanged.

        The first engine determines batch sizes and the calls of `train_batch`. Several engines must be of one kind: all
        plain, or all pipelines over the same ranks. Raises UsageError for other combinations, for an engine that is
        wrapped already, and for other objects.
        """
        self._check_kind(model)
        _check_whole_numbers(model)
        if self.models:
            self._compare_with_first(model)
        elif isinstance(model, PipelineEngine):
            self.mpu = make_deepspeed_mpu(model.grid)
        model.checkpoint_engine = self.shards
        model.config = plain_containers(model.config)  # which each save contains
        if model.zero_optimization_stage() or model.fp16_enabled() or model.bfloat16_enabled():
            self.settled += [parameter for parameter in model.module.parameters() if not parameter.requires_grad]
        self.models.append(model)
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Set the unit of another kind of model parallelism than DeepSpeed's pipelines; see ModelParallelUnit.

        Call it once, after the first engine is wrapped. Raises UsageError otherwise, and for impossible numbers.
        """
        if not self.models:
            raise UsageError("set_mpu: no model engine is wrapped yet; call wrap_model_engine first")
        if self._mpu_is_given:
            raise UsageError("set_mpu: the ModelParallelUnit is set already; call it once")
        self.mpu = checked_unit(mpu, self.distributed.size)
        self._mpu_is_given = True

    wrap_mpu = set_mpu
    """Name of `set_mpu` in the documentation of Determined's ModelParallelUnit."""

    def disable_auto_grad_accumulation(self) -> None:
        """Call `train_batch` once for all micro batches of a batch."""
        self._accumulates = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders of other classes. They must shuffle, repeat, shard and skip batches themselves."""
        self.checks_dataset_reproducibility = False

    def check(self) -> None:
        """Raise UsageError with all inconsistencies of the engines and the configuration, after the trial is built."""
        if problems := list(self._problems()):
            raise UsageError(problems)

    # --- information

    @property
    def use_pipeline_parallel(self) -> bool:
        return any(isinstance(engine, PipelineEngine) for engine in self.models)

    @property
    def auto_grad_accumulation(self) -> bool:
        """True if the loop calls `train_batch` once for every micro batch."""
        return self._accumulates and not self.use_pipeline_parallel

    @property
    def evaluates_together(self) -> bool:
        """True if the ranks of an engine must evaluate the same number of batches, since they communicate in each."""
        shares_model = self.mpu.data_parallel_world_size < self.distributed.size
        return self.use_pipeline_parallel or shares_model or any(map(_exchanges_parameters, self.models))

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Records in a batch of the training loader, as the first engine is configured."""
        return int(self._first.train_micro_batch_size_per_gpu())

    @property
    def num_micro_batches_per_slot(self) -> int:
        """Number of loader batches in a training batch: gradient_accumulation_steps of the first engine."""
        return int(self._first.gradient_accumulation_steps())

    def get_train_micro_batch_size_per_gpu(self) -> int:
        return self.train_micro_batch_size_per_gpu

    def get_num_micro_batches_per_slot(self) -> int:
        return self.num_micro_batches_per_slot

    def get_per_slot_batch_size(self) -> int:
        """Return the records of one training batch on each rank that loads data."""
        return self.train_micro_batch_size_per_gpu * self.num_micro_batches_per_slot

    def get_hparam(self, name: str) -> Any:
        """Return a hyperparameter. Raises UsageError that names the known ones."""
        return self._hparam(name)

    # --- helpers

    @property
    def _first(self) -> Any:
        if not self.models:
            raise UsageError("no model engine is wrapped yet; call context.wrap_model_engine first")
        return self.models[0]

    def _check_kind(self, model: Any) -> None:
        if not isinstance(model, DeepSpeedEngine):
            raise UsageError(
                f"wrap_model_engine: got {type(model).__name__}; pass the engine, the first thing that "
                f"deepspeed.initialize returns"
            )
        if any(model is known for known in self.models):
            raise UsageError("wrap_model_engine: this engine is wrapped already; wrap each engine once")
        if self.models and isinstance(model, PipelineEngine) is not self.use_pipeline_parallel:
            raise UsageError(
                f"wrap_model_engine: a {type(model).__name__} after a {type(self._first).__name__}: a pipeline and a "
                f"plain engine divide the data differently; wrap engines of one kind"
            )

    def _compare_with_first(self, model: Any) -> None:
        if isinstance(model, PipelineEngine):
            self._check_same_grid(make_deepspeed_mpu(model.grid), make_deepspeed_mpu(self._first.grid))
        own, firsts = _micro_batches(model), _micro_batches(self._first)
        if own != firsts:
            warnings.warn(
                f"wrap_model_engine: an engine has {own}, and the first one {firsts}: loaders and calls of train_batch "
                f"follow the first",
                stacklevel=3,
            )

    def _check_same_grid(self, own: ModelParallelUnit, firsts: ModelParallelUnit) -> None:
        mine = (own.data_parallel_rank, own.data_parallel_world_size)
        if mine != (firsts.data_parallel_rank, firsts.data_parallel_world_size):
            raise UsageError(
                f"wrap_model_engine: rank {self.distributed.rank} is in pipeline {mine[0]} of {mine[1]}, but for the "
                f"first engine in pipeline {firsts.data_parallel_rank} of {firsts.data_parallel_world_size}; give all "
                f"PipelineModules the same number of stages"
            )

    def _problems(self) -> Iterator[str]:
        if not self.models:
            yield "__init__ wraps no model engine; call context.wrap_model_engine, or there is nothing to train"
            return
        for engine in self.models:
            yield from self._batch_problems(engine)
            if engine.use_node_local_storage():
                yield (
                    "deepspeed config: checkpoint.use_node_local_storage: all ranks write into one folder, which all "
                    "nodes see; leave it out"
                )
            if self.use_pipeline_parallel and engine.bfloat16_enabled() and not engine.zero_optimization_stage():
                yield (
                    "deepspeed config: bf16.enabled in a pipeline with zero_optimization.stage 0: DeepSpeed cannot "
                    "load the checkpoints that it saves with these; use stage 1"
                )
        optimizations = self._spec["config"].get("optimizations", {})
        for name, (default, remedy) in _ENGINES_OWN.items():
            if (value := optimizations.get(name, default)) != default:
                yield f"optimizations.{name}: {shown(value)} is for a PyTorchTrial; {remedy}"
        whole = self._spec["hparams"].get("global_batch_size")
        configured = self._first.train_batch_size()
        if whole is not None and whole != configured:
            yield (
                f"hyperparameters.global_batch_size: {shown(whole)}, and train_batch_size of the deepspeed config is "
                f"{configured} ({_micro_batches(self._first)}, data-parallel size "
                f"{self.mpu.data_parallel_world_size}); make them the same, with overwrite_deepspeed_config, "
                f"or leave global_batch_size out"
            )

    def _batch_problems(self, engine: Any) -> Iterator[str]:
        configured, size = engine.train_batch_size(), self.mpu.data_parallel_world_size
        product = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps() * size
        if configured != product:
            yield (
                f"deepspeed config: train_batch_size is {configured}, and {_micro_batches(engine)}, data-parallel size "
                f"{size} of {count(self.distributed.size, 'rank')} make {product}: the engine's data-parallel size is "
                f"{engine.dp_world_size}; give deepspeed.initialize and context.set_mpu the same model parallelism"
            )


def _check_whole_numbers(engine: Any) -> None:
    """Raise UsageError for sizes such as 2.0, which DeepSpeed accepts but a loader does not."""
    numbers = {
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
    }
    if wrong := {name: value for name, value in numbers.items() if not isinstance(value, int)}:
        problems = [f"deepspeed config: {name}: {value!r} is not a whole number" for name, value in wrong.items()]
        raise UsageError(problems)


def _micro_batches(engine: Any) -> str:
    return (
        f"train_micro_batch_size_per_gpu {engine.train_micro_batch_size_per_gpu()}, gradient_accumulation_steps "
        f"{engine.gradient_accumulation_steps()}"
    )


def _exchanges_parameters(engine: Any) -> bool:
    return bool(engine.zero_optimization_stage() == 3 or engine.has_moe_layers)
