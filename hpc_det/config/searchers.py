"""The schema of the searchers, which decide how many trials run and how long each one trains."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from hpc_det.config.fields import (
    ClassName,
    Divisor,
    Expected,
    Flag,
    FreeMap,
    MaxLength,
    NotNegative,
    OptionalText,
    Positive,
    PositiveList,
    Text,
    TrialName,
    Unit,
)
from hpc_det.config.merge import Tree
from hpc_det.config.section import Section, kind_discriminator


class SearcherKind(Section):
    kind_key = "name"

    name: str
    metric: Annotated[Text, Expected("the name of a validation metric, such as accuracy")] = Field(
        description="Validation metric by which trials are compared."
    )
    smaller_is_better: Flag = Field(default=True, description="Whether a smaller value of the metric is better.")
    source_trial_id: TrialName | None = Field(
        default=None,
        description="Trial from whose latest checkpoint all trials load their initial weights; for an experiment with "
        "several trials, its best trial.",
    )
    source_checkpoint_uuid: OptionalText = Field(
        default=None, description="Checkpoint from which all trials load their initial weights."
    )
    max_length: MaxLength | None = Field(
        default=None,
        description="Longest training of a trial. May be omitted only for a script that decides itself when its "
        "training ends.",
    )


class _ManyTrials(SearcherKind):
    max_concurrent_trials: NotNegative = Field(
        default=16, description="Most trials that train at the same time; 0: no limit."
    )


class _MaxTrials(_ManyTrials):
    max_trials: Positive = Field(description="Total number of trials.")


class _Halving(_MaxTrials):
    divisor: Divisor = Field(
        default=4, description="Of the trials that reach a rung, the best 1/divisor are trained on to the next one."
    )
    stop_once: Flag = Field(
        default=False,
        description="A trial that is not among the best at a rung stops for good. false: it pauses, and continues if "
        "it is among the best later.",
    )
    # Determined 0.38 writes the length as two keys; in_todays_names joins them into max_length.
    time_metric: Unit | None = Field(
        default=None, exclude=True, description="Unit of max_time; both together are a newer spelling of max_length."
    )
    max_time: Positive | None = Field(
        default=None,
        exclude=True,
        description="Longest training of a trial in units of time_metric; both together are a newer spelling of "
        "max_length.",
    )


class Single(SearcherKind):
    name: Literal["single"] = Field(default="single", description="One trial.")


class Random(_MaxTrials):
    name: Literal["random"] = Field(description="Trials with hyperparameters drawn at random.")


class Grid(_ManyTrials):
    name: Literal["grid"] = Field(description="One trial for each point of the grid of hyperparameters.")


class Points(_ManyTrials):
    name: Literal["points"] = Field(
        description="One trial for each element of a list of hyperparameters, such as the points of a Hydra sweep."
    )
    points: Annotated[list[Tree], Field(min_length=1), Expected("a list of maps, at least one")] = Field(
        description="Hyperparameters of each trial; all of them constants."
    )


class AsyncHalving(_Halving):
    name: Literal["async_halving"] = Field(description="Many short trials, of which only the best are trained further.")
    num_rungs: Positive = Field(
        description="Number of rungs, the lengths at which trials are compared; the last rung is max_length."
    )


class AdaptiveAsha(_Halving):
    name: Literal["adaptive_asha"] = Field(
        description="Several async_halving searches (brackets) with different numbers of rungs."
    )
    mode: Literal["standard", "aggressive", "conservative"] = Field(
        default="standard",
        description="Brackets to run: aggressive, only the one with the most rungs, which stops trials the earliest; "
        "standard, also those with at least half as many; conservative, all.",
    )
    max_rungs: Positive = Field(default=5, description="Most rungs of a bracket.")
    bracket_rungs: PositiveList = Field(
        default=[], description="Number of rungs of each bracket; empty: derived from mode and max_rungs."
    )


class Optuna(_MaxTrials):
    name: Literal["optuna"] = Field(description="A sampler of Optuna chooses the hyperparameters.")
    sampler: Text = Field(default="TPESampler", description="Name of a class in optuna.samplers.")
    sampler_settings: FreeMap = Field(default={}, description="Keyword arguments of the sampler's class.")


class Custom(_MaxTrials):
    name: Literal["custom"] = Field(description="A search method of your own.")
    class_: ClassName = Field(
        alias="class", description="Class of the search method, in the folder of the trial's code."
    )
    settings: FreeMap = Field(default={}, description="Keyword arguments of the class.")


_which = kind_discriminator("single", Single, Random, Grid, Points, AsyncHalving, AdaptiveAsha, Optuna, Custom)
Searcher: TypeAlias = Annotated[
    Annotated[Single, Tag("<single>")]
    | Annotated[Random, Tag("<random>")]
    | Annotated[Grid, Tag("<grid>")]
    | Annotated[Points, Tag("<points>")]
    | Annotated[AsyncHalving, Tag("<async_halving>")]
    | Annotated[AdaptiveAsha, Tag("<adaptive_asha>")]
    | Annotated[Optuna, Tag("<optuna>")]
    | Annotated[Custom, Tag("<custom>")],
    Discriminator(_which),
]

COMPARING = ("async_halving", "adaptive_asha", "optuna", "custom")
"""The searchers that choose later trials by the metrics of earlier ones."""
