"""The schema of an experiment file: keys, types, defaults."""

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
from hpc_det.config.job_sections import BindMount, Environment, Launch, Pbs, Resources, Slurm
from hpc_det.config.loggers import LoggerEntry
from hpc_det.config.searchers import Searcher
from hpc_det.config.section import Section
from hpc_det.config.storage import CheckpointStorage, OwnFolder

# Determined's built-in policies (its expconf/log_policies.go), merged by name below all layers.
LOG_POLICIES = [
    {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*"},
    {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*"},
]


class Reproducibility(Section):
    experiment_seed: Annotated[int, Field(ge=0, lt=2**31), Expected("a whole number from 0 to 2147483647")] | None = (
        Field(
            default=None,
            description="Seed from which hyperparameters and the trials' seeds are drawn; null: the time of the "
            "submission, in seconds.",
        )
    )


class Optimizations(Section):
    aggregation_frequency: Positive = Field(
        default=1, description="Number of batches whose gradients are accumulated for one optimizer step."
    )
    average_aggregated_gradients: Flag = Field(
        default=True, description="Step with the mean of the accumulated gradients; false: with their sum."
    )
    average_training_metrics: Flag = Field(
        default=True, description="Report training metrics as the mean over all slots; false: those of the first rank."
    )
    gradient_compression: Flag = Field(default=False, description="Exchange gradients in half precision.")
    mixed_precision: Annotated[
        Literal["O0", "O1"], Expected("O0 or O1; O2 and O3, with weights in half precision, existed only in apex")
    ] = Field(
        default="O0",
        description="O1: automatic mixed precision: models compute in half precision where torch.autocast allows it, "
        "as with context.experimental.use_amp() in the trial. O0: none.",
    )
    # torch's DistributedDataParallel uses buckets of 25 MB, after a first one of 1 MB.
    tensor_fusion_threshold: NotNegative | None = Field(
        default=None,
        description="Size in MB of the buckets in which gradients are exchanged (DDP's bucket_cap_mb). 0: each "
        "gradient separately; null: DDP's default, 25 after a first bucket of 1.",
    )
    grad_updates_size_file: OptionalText = Field(
        default=None, description="File to which Determined wrote the sizes of gradients with Horovod."
    )
    tensor_fusion_cycle_time: AboveZero = Field(default=1, description="A setting of Horovod.")
    auto_tune_tensor_fusion: Flag = Field(
        default=False,
        description="Choose the size of the buckets by timing the first batches; tensor_fusion_threshold is ignored.",
    )


class Profiling(Section):
    enabled: Flag = Field(
        default=False,
        description="Measure on each rank how the training time is spent, and on each node the system's load.",
    )
    begin_on_batch: NotNegative = Field(default=0, description="First batch to measure, counted from 0.")
    end_after_batch: NotNegative | None = Field(
        default=None, description="Last batch to measure; null: the last one of the training."
    )
    # CUDA runs kernels asynchronously: without a wait, the clock shows when work was queued, not when it was done.
    sync_timings: Flag = Field(
        default=True,
        description="Wait for the GPU before each time is taken, so that its work counts for the step that started "
        "it; this slows training down. false: its work counts for the next step that waits for the GPU.",
    )


_Action: TypeAlias = Literal["cancel_retries", "exclude_node"]


def _action(value: Any) -> Any:
    """Return the action's name, also from the form `{type: cancel_retries}` of Determined 0.25 to 0.37."""
    return value["type"] if isinstance(value, dict) and value.keys() == {"type"} else value


class LogPolicy(Section):
    name: Text | None = Field(
        default=None,
        description="Name of the policy. A name without a pattern disables the built-in policy of that name.",
    )
    pattern: Regex | None = Field(
        default=None, description="Regular expression that is searched for in each line of the trial's logs."
    )
    action: (
        Annotated[
            _Action,
            BeforeValidator(_action, json_schema_input_type=_Action | dict[Literal["type"], _Action]),
            Expected("cancel_retries or exclude_node"),
        ]
        | None
    ) = Field(
        default=None,
        description="Action if an attempt fails and a line of its logs matches. cancel_retries: the trial is given up; "
        "exclude_node: jobs of the experiment avoid the node of the rank whose log matched; null: the match is only "
        "recorded, as every match is, in the trial's journal.",
    )


_State: TypeAlias = Literal["RUNNING", "PAUSED", "COMPLETED", "ERROR", "CANCELED"]
_Command = Annotated[
    list[str],
    Field(min_length=1),
    Expected("a list of words, such as [./notify.sh, --all]; for a shell, [sh, -c, ...]"),
]
# An address as browsers accept it (HTML, 4.10.5.1.5), or the name of a user of this machine. Lists of addresses and
# other headers are refused, since the text goes into the header of a mail.
_NAME = r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+"
_Mail = Annotated[
    str,
    Field(pattern=rf"^{_NAME}(@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*)?$"),
    Expected("one address, such as ada@example.org"),
]


class Hook(Section):
    """A notification hook; exactly one of command, webhook and mail is set."""

    command: _Command | None = Field(
        default=None,
        description="Program that runs in the folder of the experiment's code and reads the notification, as JSON, "
        "from standard input.",
    )
    webhook: OptionalText = Field(
        default=None,
        description="URL to which the notification is sent by POST, as JSON; masked wherever the configuration is "
        "shown.",
    )
    mail: _Mail | None = Field(
        default=None, description="Address to which the machine's sendmail program mails the notification."
    )
    states: Annotated[
        list[_State], Field(min_length=1), Expected("a list of RUNNING, PAUSED, COMPLETED, ERROR and CANCELED")
    ] = Field(
        default=["COMPLETED", "ERROR", "CANCELED"],
        description="States of the experiment for which this hook is called.",
    )


class RetentionPolicy(Section):
    log_retention_days: Annotated[int, Field(ge=-1, le=32767), Expected("a whole number from -1 to 32767")] | None = (
        Field(
            default=None,
            description="Days to keep logs after the experiment ends; -1 or null keeps them.",
        )
    )


class Experiment(Section):
    """A complete experiment. Defaults are Determined's (its schemas/expconf/v0)."""

    name: Annotated[Text, Expected("a name for the experiment, not empty")] = Field(
        default="experiment",
        description="Name shown in lists. If unset: the name of the experiment file, else the trial's class, else "
        "`experiment`.",
    )
    description: AnyText = Field(default="", description="Free text.")
    labels: DistinctTexts = Field(default=[], description="Words by which to find the experiment.")
    project: AnyText = Field(default="", description="Project of the experiment in Determined's web UI.")
    workspace: AnyText = Field(default="", description="Workspace of the project in Determined's web UI.")
    data: FreeMap = Field(
        default={},
        description="Free-form settings that the trial reads. Values below its key `secrets` are masked wherever the "
        "configuration is shown.",
    )
    debug: Flag = Field(default=False, description="Determined's switch for debug logging.")
    entrypoint: Entrypoint = Field(
        description="Command that each node runs, or `module:Class`, a trial class whose ranks hpc_det starts itself."
    )
    hyperparameters: FreeMap = Field(
        default={},
        description="Free-form settings that the trial reads. A map with a `type` other than const is a range from "
        "which the searcher chooses a value.",
    )
    # validate_default: if no layer sets a searcher, the error names the keys that are required.
    searcher: Searcher = Field(
        default_factory=dict,
        validate_default=True,
        description="Search method: how many trials run, and how long each trains.",
    )
    resources: Resources = Field(default=Resources(), description="Resources that a trial's job requests.")
    max_restarts: NotNegative = Field(
        default=5,
        description="Restarts of a trial after failures before it is given up; 0: none. Preemptions, time limits, "
        "hangs and lost nodes do not count.",
    )
    max_attempts_without_progress: Positive = Field(
        default=5,
        description="Attempts in a row without a newer checkpoint after which a trial is given up; ten times as many "
        "if they ended too early to save one.",
    )
    records_per_epoch: NotNegative = Field(default=0, description="Number of records of an epoch in Determined.")
    scheduling_unit: Positive = Field(
        default=100, description="Batches between two reports of training metrics; validations cause further ones."
    )
    min_validation_period: Period = Field(
        default=Length(0),
        description="Longest stretch of training between two validations; 0: validate only at the end.",
    )
    min_checkpoint_period: Period = Field(
        default=Length(0),
        description="Longest stretch of training between two checkpoints; 0: no such limit, and one checkpoint at the "
        "end.",
    )
    checkpoint_interval: Annotated[Literal["auto", "none"], Expected("auto or none")] = Field(
        default="auto",
        description="auto: also save at the interval that minimises the expected lost work, computed from the duration "
        "of saves and the time between interruptions (Young/Daly). none: save only as min_checkpoint_period and "
        "checkpoint_policy require, unless the grace time is too short for a save. The default is none where "
        "min_checkpoint_period is set.",
    )
    asynchronous_checkpoints: Flag = Field(
        default=True,
        description="Continue training while a checkpoint is written from a copy in memory. false: training waits for "
        "the disk, and no memory is needed for the copy.",
    )
    checkpoint_staging: Annotated[Text, Expected("a folder of the node, such as $TMPDIR")] | None = Field(
        default=None,
        description="Folder on a disk of the node for the copies from which checkpoints are written; variables of the "
        "job are expanded. null: the copies are in memory.",
    )
    hang_timeout_s: NotNegative | None = Field(
        default=None,
        description="Seconds without a step after which a rank counts as hung and its attempt ends. 0 disables the "
        "check; null derives it from step times.",
    )
    perform_initial_validation: Flag = Field(default=False, description="Validate once before the training starts.")
    checkpoint_policy: Literal["best", "all", "none"] = Field(
        default="best",
        description="Validations after which a checkpoint is saved: best (each that improves on the metric), all or "
        "none.",
    )
    reproducibility: Reproducibility = Field(default=Reproducibility(), description="Seed of the experiment.")
    optimizations: Optimizations = Field(
        default=Optimizations(), description="Accumulation, precision and exchange of gradients."
    )
    profiling: Profiling = Field(default=Profiling(), description="Profiling of a trial.")
    environment: Environment = Field(
        default=Environment(), description="Container image and environment variables of the ranks."
    )
    launch: Launch = Field(default=Launch(), description="Start of the ranks on each node.")
    bind_mounts: Annotated[list[BindMount], Expected("a list of maps with host_path and container_path")] = Field(
        default=[], description="Paths of the node that are mounted into the container."
    )
    slurm: Slurm = Field(default=Slurm(), description="Settings for clusters with Slurm.")
    pbs: Pbs = Field(default=Pbs(), description="Settings for clusters with PBS.")
    checkpoint_storage: CheckpointStorage = Field(
        default=OwnFolder(), description="Location and retention of checkpoints."
    )
    log_policies: Annotated[list[LogPolicy], Expected("a list of maps with name, pattern and action")] = Field(
        default=[],
        description="Patterns to find in the logs, and actions. Two are built in: CUDA OOM and ECC Error, without an "
        "action.",
    )
    notify: Annotated[list[Hook], Expected("a list of maps with one of command, webhook and mail")] = Field(
        default=[], description="Hooks called when the experiment starts, pauses or ends."
    )
    loggers: Annotated[list[LoggerEntry], Expected("a list of maps with one of wandb and mlflow")] = Field(
        default=[], description="Services to which rank 0 sends the metrics of its trial."
    )
    retention_policy: RetentionPolicy = Field(default=RetentionPolicy(), description="Retention of logs.")
    preemption_timeout: Positive | None = Field(
        default=None, description="Seconds that Determined gives a preempted trial to save."
    )
    integrations: FreeMap | None = Field(default=None, description="Other services that Determined works with.")
    tensorboard_storage: FreeMap | None = Field(default=None, description="Determined's storage of TensorBoard files.")
    security: FreeMap | None = Field(default=None, description="Settings of Determined's master.")
    data_layer: FreeMap | None = Field(default=None, description="Determined's former cache of data sets.")
    internal: FreeMap | None = Field(default=None, description="Settings of Determined's master.")

    @model_validator(mode="before")
    @classmethod
    def _given_period_replaces_interval(cls, data: Any) -> Any:
        """Set checkpoint_interval to "none" where min_checkpoint_period is given and checkpoint_interval is not."""
        # A period is an explicit choice: saves in addition to it must be requested explicitly, too.
        if isinstance(data, dict) and data.get("min_checkpoint_period") is not None:
            return {**data, "checkpoint_interval": data.get("checkpoint_interval") or "none"}
        return data
