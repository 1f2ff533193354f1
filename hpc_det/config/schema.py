"""What an experiment may say: keys, types, defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from hpc_det.config.fields import (
    AboveZero,
    AnyText,
    DistinctTexts,
    Entrypoint,
    Expected,
    Flag,
    FreeMap,
    Length,
    NotNegative,
    OptionalText,
    Period,
    Positive,
    Regex,
    Text,
)
from hpc_det.config.job_sections import BindMount, Environment, Pbs, Resources, Slurm
from hpc_det.config.searchers import Searcher
from hpc_det.config.section import Section
from hpc_det.config.storage import CheckpointStorage, OwnFolder

# Determined's own, merged below all layers by name (its expconf/log_policies.go).
LOG_POLICIES = [
    {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*"},
    {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*"},
]


class Reproducibility(Section):
    experiment_seed: Annotated[int, Field(ge=0, lt=2**31), Expected("a whole number from 0 to 2147483647")] | None = (
        Field(
            default=None,
            description="What hyperparameters and trials' seeds are drawn from; by default the second of submission.",
        )
    )


class Optimizations(Section):
    aggregation_frequency: Positive = Field(default=1, description="Gradients of so many batches make one step.")
    average_aggregated_gradients: Flag = Field(default=True, description="Their mean makes the step, not their sum.")
    average_training_metrics: Flag = Field(default=True, description="Training metrics are the mean over all slots.")
    gradient_compression: Flag = Field(default=False, description="Gradients travel in half precision.")
    mixed_precision: Annotated[
        Literal["O0", "O1"], Expected("O0 or O1; O2 and O3, with weights in half precision, have ended with apex")
    ] = Field(
        default="O0",
        description="O1: models compute in half precision, as with context.experimental.use_amp() in the trial.",
    )
    tensor_fusion_threshold: NotNegative | None = Field(
        default=None,
        description="Gradients are exchanged in buckets of so many MB, DDP's bucket_cap_mb; 0: each one by itself; "
        "null: as DDP does it, 25 after a first one of 1.",
    )
    tensor_fusion_cycle_time: AboveZero = Field(default=1, description="A setting of horovod.")
    auto_tune_tensor_fusion: Flag = Field(
        default=False, description="The first batches find out the size of buckets, and no threshold is looked at."
    )


class Profiling(Section):
    enabled: Flag = Field(
        default=False,
        description="Where the time of training goes is measured on each rank, and what each node does meanwhile.",
    )
    begin_on_batch: NotNegative = Field(default=0, description="The first batch that is measured.")
    end_after_batch: NotNegative | None = Field(
        default=None, description="The last batch that is measured; null: all that follow."
    )
    sync_timings: Flag = Field(
        default=True,
        description="A GPU finishes its work before a time is taken, so that it counts where it was asked for, and "
        "training waits for that. false: what the GPU still has to do counts where training waits for it anyway.",
    )


_Action: TypeAlias = Literal["cancel_retries", "exclude_node"]


def _action(value: Any) -> Any:
    """Determined 0.25 to 0.37 wrote `action: {type: cancel_retries}`."""
    return value["type"] if isinstance(value, dict) and value.keys() == {"type"} else value


class LogPolicy(Section):
    name: Text | None = Field(default=None, description="A name alone switches off the default policy of that name.")
    pattern: Regex | None = Field(default=None, description="What a line of the log looks like.")
    action: (
        Annotated[
            _Action,
            BeforeValidator(_action, json_schema_input_type=_Action | dict[Literal["type"], _Action]),
            Expected("cancel_retries or exclude_node"),
        ]
        | None
    ) = Field(
        default=None,
        description="What happens then, if the attempt fails: cancel_retries, the trial is given up; exclude_node, "
        "jobs of the experiment keep away from the node of the rank whose log it is. Matches are noted in the trial's "
        "journal.",
    )


_State: TypeAlias = Literal["RUNNING", "PAUSED", "COMPLETED", "ERROR", "CANCELED"]
_Command = Annotated[
    list[str], Field(min_length=1), Expected("a list of words, such as [./tell.sh, --loud]; for a shell, [sh, -c, ...]")
]
# An address as browsers take it (HTML, 4.10.5.1.5), or the name of a user of this machine; no list, no other header.
_NAME = r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+"
_Mail = Annotated[
    str,
    Field(pattern=rf"^{_NAME}(@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*)?$"),
    Expected("one address, such as ada@example.org"),
]


class Hook(Section):
    """One of command, webhook and mail."""

    command: _Command | None = Field(
        default=None,
        description="A program that is run in the folder of the experiment's code, with the news on standard input.",
    )
    webhook: OptionalText = Field(
        default=None, description="An address that gets the news by POST; hidden wherever the config is shown."
    )
    mail: _Mail | None = Field(default=None, description="Who gets a mail, by the sendmail of the machine.")
    states: Annotated[
        list[_State], Field(min_length=1), Expected("a list of RUNNING, PAUSED, COMPLETED, ERROR and CANCELED")
    ] = Field(default=["COMPLETED", "ERROR", "CANCELED"], description="The news that this hook wants.")


class RetentionPolicy(Section):
    log_retention_days: Annotated[int, Field(ge=-1, le=32767), Expected("a whole number from -1 to 32767")] | None = (
        Field(
            default=None,
            description="Days to keep logs after the experiment ends; -1 or null keeps them.",
        )
    )


class Experiment(Section):
    """One experiment, complete. Defaults are Determined's (its schemas/expconf/v0)."""

    name: Annotated[Text, Expected("a name for the experiment, not empty")] = Field(
        default="experiment",
        description="What lists show. Better than this default is that of a file, its own name, or the trial's class.",
    )
    description: AnyText = Field(default="", description="Free text.")
    labels: DistinctTexts = Field(default=[], description="Words to find the experiment by.")
    project: AnyText = Field(default="", description="Where Determined's web page shows the experiment.")
    workspace: AnyText = Field(default="", description="Where Determined's web page shows the project.")
    data: FreeMap = Field(default={}, description="Yours: the trial reads it. What is in `secrets` is hidden.")
    debug: Flag = Field(default=False, description="Determined's log level.")
    entrypoint: Entrypoint = Field(description="The command that every node runs, or `module:Class` of a trial.")
    hyperparameters: FreeMap = Field(
        default={}, description="Yours: the trial reads their values. A map with a `type` is a range of values."
    )
    # A searcher that nobody wrote is validated too, so that an error names the keys it lacks.
    searcher: Searcher = Field(
        default_factory=dict, validate_default=True, description="Which trials are trained, and how long."
    )
    resources: Resources = Field(default=Resources(), description="What a trial's job asks the scheduler for.")
    max_restarts: NotNegative = Field(default=5, description="A trial that fails starts again so many times.")
    max_attempts_without_progress: Positive = Field(
        default=5,
        description="A trial is given up after so many attempts in a row without a newer checkpoint, or ten times as "
        "many that ended too early to save one.",
    )
    records_per_epoch: NotNegative = Field(default=0, description="Determined's size of an epoch.")
    scheduling_unit: Positive = Field(default=100, description="Training metrics are reported every so many batches.")
    min_validation_period: Period = Field(
        default=Length(0), description="The trial is validated at least so often; 0 is only at its end."
    )
    min_checkpoint_period: Period = Field(
        default=Length(0), description="A checkpoint is saved at least so often; 0 is only at its end."
    )
    checkpoint_interval: Annotated[Literal["auto", "none"], Expected("auto or none")] = Field(
        default="auto",
        description="auto: a checkpoint is also saved at the interval that minimises the expected lost work, by how "
        "long saves take and how often jobs end early (Young, Daly). none: only where min_checkpoint_period and "
        "checkpoint_policy say, unless a grace time is too short for a save; the default where min_checkpoint_period "
        "is given.",
    )
    asynchronous_checkpoints: Flag = Field(
        default=True,
        description="Training goes on while a checkpoint is written from a copy in memory. false: it waits for the "
        "disk, and no memory is needed.",
    )
    checkpoint_staging: Annotated[Text, Expected("a folder of the node, such as $TMPDIR")] | None = Field(
        default=None,
        description="The copies that are being written lie in this folder, which must be on a disk of the node's own, "
        "instead of in memory. Variables are those of the job.",
    )
    hang_timeout_s: NotNegative | None = Field(
        default=None,
        description="Seconds without a step after which a rank counts as hung and its attempt ends. 0 disables the "
        "check; null derives it from step times.",
    )
    perform_initial_validation: Flag = Field(default=False, description="The trial is validated before it trains.")
    checkpoint_policy: Literal["best", "all", "none"] = Field(
        default="best", description="After which validations a checkpoint is saved."
    )
    reproducibility: Reproducibility = Field(default=Reproducibility(), description="Where chance begins.")
    optimizations: Optimizations = Field(default=Optimizations(), description="How gradients become steps.")
    profiling: Profiling = Field(default=Profiling(), description="Measurements of a trial.")
    environment: Environment = Field(default=Environment(), description="What the ranks run in.")
    bind_mounts: Annotated[list[BindMount], Expected("a list of maps with host_path and container_path")] = Field(
        default=[], description="Folders that a container sees."
    )
    slurm: Slurm = Field(default=Slurm(), description="For clusters with Slurm.")
    pbs: Pbs = Field(default=Pbs(), description="For clusters with PBS.")
    checkpoint_storage: CheckpointStorage = Field(
        default=OwnFolder(), description="Where checkpoints lie, and how many are kept."
    )
    log_policies: Annotated[list[LogPolicy], Expected("a list of maps with name, pattern and action")] = Field(
        default=[], description="What is done about a line of the log. Two are always there: CUDA OOM, ECC Error."
    )
    notify: Annotated[list[Hook], Expected("a list of maps with one of command, webhook and mail")] = Field(
        default=[], description="Hooks called when the experiment starts, pauses or ends."
    )
    retention_policy: RetentionPolicy = Field(default=RetentionPolicy(), description="How long logs stay.")
    preemption_timeout: Positive | None = Field(
        default=None, description="The seconds that Determined gives a preempted trial."
    )
    integrations: FreeMap | None = Field(default=None, description="Other services that Determined works with.")
    tensorboard_storage: FreeMap | None = Field(default=None, description="Where Determined keeps TensorBoard files.")
    security: FreeMap | None = Field(default=None, description="Settings of Determined's master.")
    data_layer: FreeMap | None = Field(default=None, description="A cache of Determined's that is gone.")
    internal: FreeMap | None = Field(default=None, description="Settings of Determined's master.")

    @model_validator(mode="before")
    @classmethod
    def _given_period_replaces_interval(cls, data: Any) -> Any:
        """Who says how often to save gets no other saves by default."""
        if isinstance(data, dict) and data.get("min_checkpoint_period") is not None:
            return {**data, "checkpoint_interval": data.get("checkpoint_interval") or "none"}
        return data
