"""`ray.tune.schedulers`: ASHAScheduler, PopulationBasedTraining and FIFOScheduler as searchers of hpc_det.sgd.tune."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from hpc_det.compat.ray_tune.error import TuneError
from hpc_det.errors import UsageError
from hpc_det.sgd import tune
from hpc_det.sgd.tune.draws import Tree
from hpc_det.sgd.tune.files import ITERATION

_SLACK = 1e-9
"""Added to a logarithm before it is rounded down, because log(64, 4) may be a little less than 3."""


class TrialScheduler:
    """The base class of schedulers.

    Attributes:
        metric: Name of the metric by which trials are compared; None: that of `tune.run`.
        mode: "min" or "max"; None: that of `tune.run`.
        max_t: Largest number of iterations of a trial; None: that of `stop` in `tune.run`.
    """

    metric: str | None = None
    mode: str | None = None
    max_t: int | None = None

    def searcher(self, length: int | None) -> Tree | None:
        """Return the argument `searcher` of tune_run for trials of at most `length` iterations."""
        return None

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with the hyperparameters that the scheduler adds."""
        return dict(config)


class FIFOScheduler(TrialScheduler):
    """Trials run to their ends, in the order of their numbers."""


class AsyncHyperBandScheduler(TrialScheduler):
    """Asynchronous successive halving: trials that are not among the best at a rung are stopped.

    The longest rung has `max_t` iterations, or `stop` in `tune.run` if that is less. Each of the others has one
    iteration in `reduction_factor` of the next, down to `grace_period`.

    Args:
        time_attr: Only "training_iteration".
        metric: As in TrialScheduler.
        mode: As in TrialScheduler.
        max_t: Largest number of iterations of a trial.
        grace_period: Smallest number of iterations after which a trial is stopped.
        reduction_factor: Ratio of iterations, and of trials, from one rung to the next.
        brackets: Only 1.

    Raises:
        UsageError: An argument has another value than these.
    """

    def __init__(
        self,
        time_attr: str = ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: int = 100,
        grace_period: int = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
    ) -> None:
        _check_time(type(self).__name__, time_attr)
        if brackets != 1:
            raise UsageError(
                f"brackets={brackets}: expected 1; searches with several brackets are tune_run(searcher="
                f"adaptive_asha()) of hpc_det.sgd.tune"
            )
        if not 0 < grace_period <= max_t or reduction_factor <= 1:
            raise UsageError(
                f"got grace_period {grace_period}, max_t {max_t} and reduction_factor {reduction_factor}; expected "
                f"0 < grace_period <= max_t and reduction_factor > 1"
            )
        self.metric, self.mode, self.max_t = metric, mode, max_t
        self._grace_period, self._reduction_factor = grace_period, reduction_factor

    def searcher(self, length: int | None) -> Tree:
        """Return `asha(...)`."""
        times = math.log(max((length or 1) / self._grace_period, 1), self._reduction_factor)
        return tune.asha(num_rungs=1 + int(times + _SLACK), divisor=self._reduction_factor, stop_once=True)


ASHAScheduler = AsyncHyperBandScheduler


class PopulationBasedTraining(TrialScheduler):
    """Bad trials continue as copies of good ones, with changed hyperparameters.

    Args:
        time_attr: Only "training_iteration"; it must be given, since Ray's default are seconds.
        metric: As in TrialScheduler.
        mode: As in TrialScheduler.
        perturbation_interval: Iterations between two comparisons of a trial with the others.
        burn_in_period: Only 0.
        hyperparam_mutations: The hyperparameters that change: lists of values, ranges, or functions without arguments
            that draw a number, by name, also nested. Trials start with values that are drawn from those that `config`
            does not contain.
        quantile_fraction: Fraction of the trials that count as bad, and as good; above 0, at most 0.5.
        resample_probability: Probability that a hyperparameter is drawn again instead of being changed a little.
        custom_explore_fn: Only None.
        log_config: Without effect; each result is in the run folder with its iteration.
        require_attrs: Only True.
        synch: Only False.

    Raises:
        TuneError: `hyperparam_mutations` is missing.
        UsageError: An argument has another value than these.
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        burn_in_period: float = 0.0,
        hyperparam_mutations: Mapping[str, Any] | None = None,
        quantile_fraction: float = 0.25,
        resample_probability: float = 0.25,
        custom_explore_fn: Callable[..., Any] | None = None,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
    ) -> None:
        if custom_explore_fn is not None:
            raise UsageError("custom_explore_fn: only None works here; use hyperparam_mutations")
        if not hyperparam_mutations:
            raise TuneError("hyperparam_mutations: none are given; name the hyperparameters that change")
        _check_time(type(self).__name__, time_attr)
        only = {"burn_in_period": (burn_in_period, 0), "require_attrs": (require_attrs, True), "synch": (synch, False)}
        if wrong := [f"{name}: got {got}; only {want} works here" for name, (got, want) in only.items() if got != want]:
            raise UsageError(wrong)
        self.metric, self.mode = metric, mode
        self._mutations = {name: _mutation(value) for name, value in hyperparam_mutations.items()}
        self._searcher = tune.pbt(
            interval=_whole("perturbation_interval", perturbation_interval),
            quantile=quantile_fraction,
            mutations=self._mutations,
            resampled=resample_probability,
        )

    def searcher(self, length: int | None) -> Tree:
        """Return `pbt(...)`."""
        return self._searcher

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config, with a range for each mutation that it does not contain."""
        return _completed(config, self._mutations)


def create_scheduler(scheduler: str, **kwargs: Any) -> TrialScheduler:
    """Return the scheduler of this name: "fifo", "async_hyperband" or "pbt".

    Raises ValueError for another name.
    """
    known: dict[str, type[TrialScheduler]] = {
        "fifo": FIFOScheduler,
        "async_hyperband": AsyncHyperBandScheduler,
        "asynchyperband": AsyncHyperBandScheduler,
        "pbt": PopulationBasedTraining,
    }
    if scheduler.lower() not in known:
        raise ValueError(f"scheduler {scheduler!r}: expected one of {', '.join(map(repr, known))}")
    return known[scheduler.lower()](**kwargs)


def _check_time(scheduler: str, time_attr: str) -> None:
    if time_attr != ITERATION:
        raise UsageError(
            f"{scheduler}(time_attr={time_attr!r}): trials are compared by iterations; give time_attr={ITERATION!r}, "
            f"and count intervals and lengths in iterations"
        )


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise UsageError(f"{name}: got {value}; expected a whole number of iterations")
    return int(value)


def _mutation(value: Any) -> Any:
    """Return a mutation for pbt. Ray draws from a tune.choice of numbers again, or multiplies, as from a function."""
    if not isinstance(value, Mapping):
        return value
    if "type" not in value:
        return {name: _mutation(inner) for name, inner in value.items()}
    numbers = value.get("vals", [])
    if value["type"] != "categorical" or not all(type(number) in (int, float) for number in numbers):
        return value
    return tune.sample_from(lambda: random.choice(numbers))


def _completed(config: Mapping[str, Any], mutations: Mapping[str, Any]) -> dict[str, Any]:
    whole = dict(config)
    for name, value in mutations.items():
        if isinstance(value, Mapping) and "type" not in value:
            whole[name] = _completed(whole.get(name, {}), value)
        elif name not in whole:
            whole[name] = _range(value)
    return whole


def _range(mutation: Any) -> Any:
    """Return the range from which a mutation draws."""
    if isinstance(mutation, list):
        return tune.choice(mutation)
    return tune.sample_from(mutation) if callable(mutation) else mutation
