"""The searchers: how many trials, and how long each one trains."""

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
        description="The validation metric by which trials are compared."
    )
    smaller_is_better: Flag = Field(default=True, description="Whether a smaller value of the metric is better.")
    source_trial_id: TrialName | None = Field(
        default=None,
        description="All trials begin with the weights of this trial's latest checkpoint; of an experiment with many "
        "trials, its best one's.",
    )
    source_checkpoint_uuid: OptionalText = Field(
        default=None, description="All trials begin with the weights of this checkpoint."
    )
    max_length: MaxLength | None = Field(
        default=None,
        description="How long a trial trains, at most. Required unless the entrypoint is a script of yours that "
        "trains to its own end.",
    )


class _ManyTrials(SearcherKind):
    max_concurrent_trials: NotNegative = Field(
        default=16, description="How many trials train at the same time, at most; 0 is no limit."
    )


class _MaxTrials(_ManyTrials):
    max_trials: Positive = Field(description="How many trials there are in all.")


class _Halving(_MaxTrials):
    divisor: Divisor = Field(default=4, description="Of the trials of a rung one in so many trains on to the next.")
    stop_once: Flag = Field(
        default=False, description="A trial that was once left behind never trains on, whatever the others do."
    )
    time_metric: Unit | None = Field(
        default=None, exclude=True, description="With max_time the newer spelling of max_length: its unit."
    )
    max_time: Positive | None = Field(
        default=None, exclude=True, description="With time_metric the newer spelling of max_length: its amount."
    )


class Single(SearcherKind):
    name: Literal["single"] = Field(default="single", description="One trial.")


class Random(_MaxTrials):
    name: Literal["random"] = Field(description="Trials with hyperparameters drawn at random.")


class Grid(_ManyTrials):
    name: Literal["grid"] = Field(description="A trial for every point of the grid of hyperparameters.")


class Points(_ManyTrials):
    name: Literal["points"] = Field(description="A trial for each of a list of hyperparameters, as of a Hydra sweep.")
    points: Annotated[list[Tree], Field(min_length=1), Expected("a list of maps, at least one")] = Field(
        description="The hyperparameters of each trial, constants all of them."
    )


class AsyncHalving(_Halving):
    name: Literal["async_halving"] = Field(description="Many short trials, of which only the best train on.")
    num_rungs: Positive = Field(description="In how many steps a trial comes to max_length.")


class AdaptiveAsha(_Halving):
    name: Literal["adaptive_asha"] = Field(description="Several async_halving searches that stop trials less early.")
    mode: Literal["standard", "aggressive", "conservative"] = Field(
        default="standard", description="How early trials are stopped."
    )
    max_rungs: Positive = Field(default=5, description="The rungs of the search that stops trials the earliest.")
    bracket_rungs: PositiveList = Field(
        default=[], description="The rungs of each search; if this is empty, mode and max_rungs say it."
    )


class Optuna(_MaxTrials):
    name: Literal["optuna"] = Field(description="Optuna's samplers choose the hyperparameters.")
    sampler: Text = Field(default="TPESampler", description="A class of optuna.samplers.")
    sampler_settings: FreeMap = Field(default={}, description="Arguments of that class.")


class Custom(_MaxTrials):
    name: Literal["custom"] = Field(description="A search method of your own.")
    class_: ClassName = Field(alias="class", description="Its class, in the folder of the trial's code.")
    settings: FreeMap = Field(default={}, description="Arguments of that class.")


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
"""Their next trials follow from the metrics of earlier ones."""
