"""What an experiment may say: keys, types, defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpc_det.config.fields import (
    DeviceVariables,
    Entrypoint,
    Flag,
    FreeMap,
    Length,
    MaxLength,
    NotNegative,
    OptionalText,
    Period,
    Positive,
    SbatchArgs,
    Section,
    Text,
    Texts,
    TimeLimit,
    time_limit_min,
)
from hpc_det.config.merge import Tree


class Searcher(Section):
    name: Annotated[Literal["single"], Field(description="'single', the one searcher so far")] = "single"
    metric: Annotated[Text, Field(description="the name of a validation metric, such as accuracy")]
    smaller_is_better: Flag = True
    max_length: MaxLength


class Device(Section):
    host_path: Text
    container_path: Text
    mode: Text = "mrw"


class BindMount(Section):
    host_path: Text
    container_path: Text
    read_only: Flag = False
    propagation: Text = "rprivate"


class Resources(Section):
    slots_per_trial: Positive = 1
    resource_pool: OptionalText = None
    time_limit: TimeLimit = None
    shm_size: Annotated[int | None, Field(ge=1, description="bytes")] = None
    devices: Annotated[list[Device], Field(description="a list of devices")] = []

    @property
    def time_limit_min(self) -> int | None:
        """The limit in minutes, rounded up."""
        return time_limit_min(self.time_limit) if self.time_limit else None


class Reproducibility(Section):
    experiment_seed: Annotated[int | None, Field(ge=0, lt=2**31, description="a whole number from 0 to 2147483647")] = (
        None
    )


class Environment(Section):
    environment_variables: DeviceVariables = []
    image: Annotated[str | dict[str, str] | None, Field(description="an image, or one for each of cpu, cuda, rocm")] = (
        None
    )

    def variables(self, slot_type: str) -> list[str]:
        """NAME=value for ranks on slots of this type."""
        if isinstance(self.environment_variables, list):
            return self.environment_variables
        return self.environment_variables.get("cuda" if slot_type == "gpu" else "cpu", [])

    def image_for(self, slot_type: str) -> str | None:
        """The image for slots of this type."""
        if not isinstance(self.image, dict):
            return self.image
        return self.image.get("cuda" if slot_type == "gpu" else "cpu")


class Slurm(Section):
    sbatch_args: SbatchArgs = []


class Optimizations(Section):
    aggregation_frequency: Positive = 1
    average_aggregated_gradients: Flag = True
    average_training_metrics: Flag = True
    gradient_compression: Flag = False


class CheckpointStorage(Section):
    save_experiment_best: NotNegative = 0
    save_trial_best: NotNegative = 1
    save_trial_latest: NotNegative = 1


class Experiment(Section):
    """One experiment, complete. Defaults are Determined's (its schemas/expconf/v0)."""

    name: Annotated[Text, Field(description="a name for the experiment, not empty")]
    description: Annotated[str, Field(description="a text")] = ""
    labels: Texts = []
    data: FreeMap = {}
    entrypoint: Entrypoint
    hyperparameters: FreeMap = {}
    # A searcher that nobody wrote is validated too, so that an error names the keys it lacks.
    searcher: Searcher = Field(default_factory=dict, validate_default=True)
    resources: Resources = Resources()
    max_restarts: NotNegative = 5
    scheduling_unit: Positive = 100
    min_validation_period: Period = Length(0)
    min_checkpoint_period: Period = Length(0)
    perform_initial_validation: Flag = False
    checkpoint_policy: Annotated[Literal["best", "all", "none"], Field(description="best, all or none")] = "best"
    reproducibility: Reproducibility = Reproducibility()
    optimizations: Optimizations = Optimizations()
    environment: Environment = Environment()
    slurm: Slurm = Slurm()
    bind_mounts: Annotated[list[BindMount], Field(description="a list of mounts")] = []
    checkpoint_storage: CheckpointStorage = CheckpointStorage()

    @property
    def hparams(self) -> Tree:
        """What the trial sees: every constant as its value."""
        return constants(self.hyperparameters)


def constants(hyperparameters: Tree) -> Tree:
    """The values of a map of constant hyperparameters; a map without `type` is nested."""
    return {name: _constant(value) for name, value in hyperparameters.items()}


def _constant(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return value.get("val") if "type" in value else constants(value)
