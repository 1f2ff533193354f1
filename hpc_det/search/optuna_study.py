"""Hyperparameters that Optuna chooses: a study in Optuna's journal storage, queried when a worker takes a trial.

The search's journal is authoritative. A choice of the study is recorded there as the event "sampled", and only the
first such entry for a trial counts. Before the study is asked for another trial, it receives the results of the earlier
trials. If a process is killed after asking, its trial stays in the study, and the next process uses that trial.

Optuna is imported only by this module, and only when a study is used.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_det.errors import UsageError, nearest
from hpc_det.search.custom import load_class
from hpc_det.search.method import Exit
from hpc_det.search.sample import Space, base_of, constant, is_nested, kind_of
from hpc_det.search.state import SearchState

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

FILE = "optuna.log"
"""The file of the study, in the folder of the search's journal. Optuna's own tools can read it."""
STUDY = "hpc_det"
"""The name of the study in the file."""
_OWN = "hpc_det_trial"
"""The user attribute of a study's trial that contains the number of the search's trial."""


class OptunaStudy:
    """The study of one experiment. Any number of processes may have an instance for the same experiment."""

    def __init__(self, folder: Path, searcher: Mapping[str, Any], space: Space, seed: int, code: Path) -> None:
        """Prepare the study. Raises UsageError if Optuna cannot be imported.

        `folder`: the folder of the search's journal; `code`: the folder of the trial's code, which may contain the
        sampler.
        """
        try:
            import optuna
        except ImportError as error:
            raise UsageError(f"searcher.name: optuna cannot be imported: {error}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._searcher, self._space, self._seed, self._code = searcher, space, seed, code
        self._file = str(folder / FILE)

    def choose(self, trial: int, state: SearchState) -> dict[str, Any]:
        """Return the hyperparameters of `trial`, and the number of the study's trial that has them.

        Raises UsageError if the sampler does not exist or fails, or if the study cannot be read.
        """
        # A new sampler for each trial, so that its draws depend on the seed and the earlier trials, not on the worker.
        sampler = _sampler(self._searcher, self._seed, trial, self._code)
        try:
            study = self._open(sampler)
            self._tell(study, state)
            asked = self._ask(study, trial)
        except (ValueError, LookupError, AssertionError) as error:
            raise UsageError(
                f"{self._file}: {type(error).__name__}: {error}; if the file is damaged, delete it: Optuna then starts "
                f"again with the next trials"
            ) from error
        try:
            hparams = dict(_suggested(self._space, asked, ""))
        except Exception as error:
            name = self._searcher["sampler"]
            raise UsageError(f"searcher.sampler: {name}: {type(error).__name__}: {error}") from error
        return {"hparams": hparams, "study_trial": asked.number}

    @cached_property
    def _storage(self) -> JournalStorage:
        """The journal storage in the file."""
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        # The lock is a file that only one process can create, on NFS too. Optuna breaks one that is older than 30 s.
        return JournalStorage(JournalFileBackend(self._file, JournalFileOpenLock(self._file)))

    def _open(self, sampler: BaseSampler) -> Study:
        import optuna

        return optuna.create_study(
            storage=self._storage,
            sampler=sampler,
            study_name=STUDY,
            direction="minimize" if self._searcher["smaller_is_better"] else "maximize",
            load_if_exists=True,
        )

    def _tell(self, study: Study, state: SearchState) -> None:
        """Write the results of trials to the study, for those that it lists as running."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        for asked in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if end := _end(asked, state):
                value = end[0]
                how, values = (TrialState.FAIL, None) if value is None else (TrialState.COMPLETE, [value])
                with suppress(UpdateFinishedTrialError):  # another worker has just written it
                    self._storage.set_trial_state_values(asked._trial_id, how, values)

    def _ask(self, study: Study, trial: int) -> Trial:
        """Return the study's trial for `trial`: one that a killed process has asked for, or a new one."""
        import optuna
        from optuna.trial import TrialState, create_trial

        under_way = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        found = next((asked._trial_id for asked in under_way if asked.user_attrs[_OWN] == trial), None)
        if found is None:
            # study.ask() would add the attribute in a second step; a kill in between would leave a trial without it.
            template = create_trial(state=TrialState.RUNNING, user_attrs={_OWN: trial})
            found = self._storage.create_new_trial(self._storage.get_study_id_from_name(STUDY), template)
        return optuna.Trial(study, found)


def _end(asked: FrozenTrial, state: SearchState) -> tuple[float | None] | None:
    """Return the result of a study's trial: (value,), (None,) if it has no value, or None if it is still running."""
    number = asked.user_attrs[_OWN]
    chosen, trial = state.samples.get(number), state.trials.get(number)
    if chosen is None or trial is None:
        return None  # another worker is asking for this trial now
    if chosen["study_trial"] != asked.number:
        return (None,)  # another worker asked too, and its choice was recorded first
    if trial.ended in (None, Exit.CANCELLED) and trial.value is None:
        return None
    return (None,) if trial.value is None or not math.isfinite(trial.value) else (trial.value,)


# --- the sampler


def _sampler(searcher: Mapping[str, Any], seed: int, trial: int, code: Path) -> BaseSampler:
    """Return the searcher's sampler, created for one trial. Raises UsageError if that fails."""
    kind = _sampler_class(searcher["sampler"], code)
    settings = dict(searcher["sampler_settings"])
    try:
        if "seed" in inspect.signature(kind).parameters:
            settings.update(_seeds(kind, settings.get("seed") or seed, trial))
        return kind(**settings)
    except Exception as error:
        name = searcher["sampler"]
        raise UsageError(f"searcher.sampler_settings: {name}: {type(error).__name__}: {error}") from error


def _sampler_class(name: str, code: Path) -> type[BaseSampler]:
    """Return the class `name` of optuna.samplers, or `module:Class` of the user's code. Raises UsageError."""
    from optuna import samplers

    found = load_class(name, code) if ":" in name else getattr(samplers, name, None)
    if isinstance(found, type) and issubclass(found, samplers.BaseSampler):
        return found
    if ":" in name:
        raise UsageError(f"searcher.sampler: {name} is not a subclass of optuna.samplers.BaseSampler")
    raise UsageError(no_such_sampler(name, samplers.__all__))


def no_such_sampler(name: str, names: Sequence[str]) -> str:
    """Return the message for a sampler name that is not among `names`, the public names of optuna.samplers."""
    known = [each for each in names if each.endswith("Sampler") and each != "BaseSampler"]
    meant = nearest(name, known) or f"known: {', '.join(known)}"
    return f"searcher.sampler: optuna.samplers has no {name!r}; {meant}"


def sampler_names(optuna: Path) -> list[str]:
    """Return the public names of optuna.samplers in the package folder `optuna`; empty if its file lists none."""
    with suppress(OSError, ValueError):
        # Parsed, not imported: importing Optuna takes a second.
        for node in ast.parse((optuna / "samplers" / "__init__.py").read_bytes()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
    return []


def _seeds(kind: type[BaseSampler], seed: int, trial: int) -> dict[str, Any]:
    """Return the seed arguments of a sampler that is created for one trial."""
    from optuna.samplers import QMCSampler, RandomSampler

    if issubclass(kind, QMCSampler):  # its points are one sequence for all trials, so the seed stays the same
        return {"seed": seed, "independent_sampler": RandomSampler((seed + trial) % 2**32)}
    # With the same seed, the samplers of all trials would draw the same values.
    return {"seed": (seed + trial) % 2**32}


# --- the space


def _suggested(space: Space, asked: Trial, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each hyperparameter.

    Optuna has no nested hyperparameters; their names there are joined with dots.
    """
    for name in sorted(space):
        spec, dotted = space[name], f"{path}{name}"
        if is_nested(spec):
            yield name, dict(_suggested(spec, asked, f"{dotted}."))
        elif kind_of(spec) == "const":
            yield name, constant(spec)
        else:
            yield name, _value(spec, asked, dotted)


def _value(spec: Mapping[str, Any], asked: Trial, name: str) -> Any:
    """Return the value that Optuna suggests. `count` is only for grids, and is ignored."""
    match kind_of(spec):
        case "categorical":
            return _choice(spec["vals"], asked, name)
        case "int":
            return asked.suggest_int(name, spec["minval"], spec["maxval"])
        case "double":
            return asked.suggest_float(name, spec["minval"], spec["maxval"])
    low, high = sorted(base_of(spec) ** spec[end] for end in ("minval", "maxval"))
    return asked.suggest_float(name, low, high, log=True)


def _choice(values: list[Any], asked: Trial, name: str) -> Any:
    """Return the chosen value of a categorical hyperparameter."""
    if _is_plain(values):
        return asked.suggest_categorical(name, values)
    # Values that Optuna cannot store, such as lists, or cannot distinguish, such as 1 and true, are represented by
    # their index.
    return values[asked.suggest_categorical(name, range(len(values)))]


def _is_plain(values: list[Any]) -> bool:
    """Return whether Optuna can store the values and distinguish them."""
    are_scalars = all(isinstance(value, (str, int, float, bool, type(None))) for value in values)
    return are_scalars and len(set(values)) == len(values)
