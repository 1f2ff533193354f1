"""What an experiment and a cluster profile may say: keys, types, defaults.

Each field's description completes "expected ..." in an error message. Null means unset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    model_validator,
)

from hpc_det.config.managed_flags import refuse_managed_flags
from hpc_det.config.merge import Tree

Unit: TypeAlias = Literal["batches", "records", "epochs"]


@dataclass(frozen=True)
class Length:
    """An amount of training."""

    amount: int
    unit: Unit = "batches"


def _length(value: object) -> Length:
    if isinstance(value, Length):
        return value
    if not isinstance(value, dict):
        value = {"batches": value}
    ((unit, amount),) = value.items()
    if unit not in get_args(Unit) or type(amount) is not int or amount < 0:
        raise ValueError
    return Length(amount, cast(Unit, unit))


def _positive_length(value: object) -> Length:
    length = _length(value)
    if length.amount == 0:
        raise ValueError
    return length


def time_limit_min(value: str | int) -> int:
    """Minutes of "HH:MM:SS", "D-HH:MM:SS" or plain minutes, rounded up; ValueError for anything else and for zero."""
    if type(value) is int or (isinstance(value, str) and re.fullmatch(r"[0-9]+", value)):
        seconds = int(value) * 60
    else:
        parts = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])", str(value))
        if not parts:
            raise ValueError
        days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if seconds <= 0:
        raise ValueError
    return -(-seconds // 60)


def _time_limit(value: str | int) -> str:
    time_limit_min(value)
    return str(value)


def _entrypoint(value: object) -> str | list[str]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and value[0] and all(isinstance(word, str) for word in value):
        return value
    raise ValueError


def _sbatch_args(arguments: list[str]) -> list[str]:
    refuse_managed_flags(arguments)
    return arguments


_LENGTH = "one of batches, records, epochs with a whole number >= {}, such as {{batches: 100}} or 100"
_AsMap = PlainSerializer(lambda length: {length.unit: length.amount}, return_type=dict[str, int])
Period: TypeAlias = Annotated[Length, PlainValidator(_length), _AsMap, Field(description=_LENGTH.format(0))]
MaxLength: TypeAlias = Annotated[Length, PlainValidator(_positive_length), _AsMap, Field(description=_LENGTH.format(1))]
TimeLimit: TypeAlias = Annotated[
    str | None,
    PlainValidator(_time_limit),
    Field(description="HH:MM:SS, D-HH:MM:SS or whole minutes, more than zero"),
]
Entrypoint: TypeAlias = Annotated[
    str | list[str],
    PlainValidator(_entrypoint),
    Field(description="a command such as `python3 -m hpc_det.launch.torch_distributed --trial model_def:MyTrial`"),
]
Positive: TypeAlias = Annotated[int, Field(ge=1, description="a whole number >= 1")]
NotNegative: TypeAlias = Annotated[int, Field(ge=0, description="a whole number >= 0")]
Flag: TypeAlias = Annotated[bool, Field(description="true or false")]
Text: TypeAlias = Annotated[str, Field(min_length=1, pattern=r"\S", description="a text that is not empty")]
OptionalText: TypeAlias = Annotated[
    str | None, Field(min_length=1, pattern=r"\S", description="a text that is not empty")
]
Texts: TypeAlias = Annotated[list[str], Field(description="a list of texts")]
FreeMap: TypeAlias = Annotated[Tree, Field(description="a map")]
SbatchArgs: TypeAlias = Annotated[Texts, AfterValidator(_sbatch_args)]

# Tags in angle brackets are no part of a value's path.
Variable: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=")]
Variables: TypeAlias = Annotated[list[Variable], Field(description="a list of NAME=value")]
DeviceVariables: TypeAlias = Annotated[
    Annotated[list[Variable], Tag("<list>")]
    | Annotated[dict[Literal["cpu", "cuda", "rocm"], list[Variable]], Tag("<map>")],
    Discriminator(lambda value: "<map>" if isinstance(value, dict) else "<list>"),
    Field(description="a list of NAME=value, or such a list for each of cpu, cuda, rocm"),
]


class Section(BaseModel):
    """Every section: unknown keys are errors, nothing is coerced, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class Searcher(Section):
    name: Annotated[Literal["single"], Field(description="'single', the one searcher so far")] = "single"
    metric: Annotated[Text, Field(description="the name of a validation metric, such as accuracy")]
    smaller_is_better: Flag = True
    max_length: MaxLength


class Resources(Section):
    slots_per_trial: Positive = 1
    resource_pool: OptionalText = None
    time_limit: TimeLimit = None

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

    def variables(self, slot_type: str) -> list[str]:
        """NAME=value for ranks on slots of this type."""
        if isinstance(self.environment_variables, list):
            return self.environment_variables
        return self.environment_variables.get("cuda" if slot_type == "gpu" else "cpu", [])


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
    checkpoint_storage: CheckpointStorage = CheckpointStorage()

    @property
    def hparams(self) -> Tree:
        """What the trial sees: every constant as its value."""
        return constants(self.hyperparameters)


class Cluster(Section):
    """A site's profile."""

    name: Annotated[Text, Field(description="the name of the cluster")]
    scheduler: Annotated[Literal["slurm", "local"], Field(description="slurm or local")]
    slots_per_node: Positive
    slot_type: Annotated[Literal["gpu", "cpu"], Field(description="gpu or cpu")]
    max_nodes: Annotated[int | None, Field(ge=1, description="how many nodes a job can have, >= 1")] = None
    resource_pool: OptionalText = None
    gpu_flag: Annotated[Literal["gpus-per-node", "gres"], Field(description="gpus-per-node or gres")] = "gpus-per-node"
    gpu_type: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9_.-]+$", description="a GPU type as the scheduler names it, such as a100"),
    ] = None
    cpus_per_slot: Positive = 1
    mem_per_node: Annotated[str | None, Field(pattern=r"^[0-9]+[KMGT]?$", description="a size such as 16G")] = None
    time_limit: TimeLimit = None
    signal_lead_s: Positive = 90
    account: OptionalText = None
    qos: OptionalText = None
    modules: Annotated[list[Text], Field(description="a list of module names")] = []
    # The site's own shell, run in the job before anything else: the one setting that is code and not data.
    setup: Annotated[Texts, Field(description="a list of shell lines")] = []
    environment_variables: Variables = []
    srun_args: Texts = []


def constants(hyperparameters: Tree) -> Tree:
    """The values of a map of constant hyperparameters; a map without `type` is nested."""
    return {name: _constant(value) for name, value in hyperparameters.items()}


def _constant(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return value.get("val") if "type" in value else constants(value)


def keys_at(model: type[BaseModel], path: tuple[str, ...]) -> list[str] | None:
    """The keys that the section at `path` may have; None if it is no section."""
    for key in path:
        field = model.model_fields.get(key)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        model = field.annotation
    return list(model.model_fields)


def expectation(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """What may stand at `path`, in the words of the nearest field that is described."""
    keys = keys_at(model, path)
    if keys is not None:
        return f"a map with keys of {', '.join(keys)}"
    *parents, key = path
    if keys_at(model, tuple(parents)) is None:
        return expectation(model, tuple(parents))
    for parent in parents:
        model = cast(type[BaseModel], model.model_fields[parent].annotation)
    return model.model_fields[key].description or "another value"
