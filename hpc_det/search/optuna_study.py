"""Hyperparameters that Optuna chooses: a study in Optuna's own journal storage, asked when a worker takes a trial.

The search's journal has the last word. What the study says of a trial is written there, as the event "sampled", and the
first such entry stands; the study is told what became of the trials before it is asked for another one. Who is killed
after asking leaves a trial in the study that the next one takes up.

Only this module loads Optuna, and only when it is asked.
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
"""Beside the search's journal; Optuna's own tools read it."""
STUDY = "hpc_det"
_OWN = "hpc_det_trial"
"""The user attribute of a study's trial with the number of ours."""


class OptunaStudy:
    """Any number of processes may have one of the same experiment."""

    def __init__(self, folder: Path, searcher: Mapping[str, Any], space: Space, seed: int, code: Path) -> None:
        """`folder` is the search's, `code` may hold a sampler of the user's. Raises UsageError without Optuna."""
        try:
            import optuna
        except ImportError as error:
            raise UsageError(f"searcher.name: optuna cannot be imported: {error}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._searcher, self._space, self._seed, self._code = searcher, space, seed, code
        self._file = str(folder / FILE)

    def choose(self, trial: int, state: SearchState) -> dict[str, Any]:
        """The hyperparameters of `trial`, and the number of the study's trial that has them.

        The sampler is new each time, so that its draws follow from the seed and the trials before, whichever worker
        asks. Raises UsageError for a sampler that there is not, or that refuses.
        """
        sampler = _sampler(self._searcher, self._seed, trial, self._code)
        try:
            study = self._open(sampler)
            self._tell(study, state)
            asked = self._ask(study, trial)
        except (ValueError, LookupError, AssertionError) as error:
            raise UsageError(
                f"{self._file}: {type(error).__name__}: {error}; if the file is damaged, delete it: Optuna then begins "
                f"anew with the trials to come"
            ) from error
        try:
            hparams = dict(_suggested(self._space, asked, ""))
        except Exception as error:
            name = self._searcher["sampler"]
            raise UsageError(f"searcher.sampler: {name}: {type(error).__name__}: {error}") from error
        return {"hparams": hparams, "study_trial": asked.number}

    @cached_property
    def _storage(self) -> JournalStorage:
        """Its lock is a file that only one process can create, on NFS too; one that was left is broken after 30 s."""
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

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
        """What has come of the trials that the study believes under way."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        for asked in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if end := _end(asked, state):
                value = end[0]
                how, values = (TrialState.FAIL, None) if value is None else (TrialState.COMPLETE, [value])
                with suppress(UpdateFinishedTrialError):  # another worker told it just now
                    self._storage.set_trial_state_values(asked._trial_id, how, values)

    def _ask(self, study: Study, trial: int) -> Trial:
        """One that was asked for before and not sampled to the end, or a new one."""
        import optuna
        from optuna.trial import TrialState, create_trial

        under_way = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        found = next((asked._trial_id for asked in under_way if asked.user_attrs[_OWN] == trial), None)
        if found is None:
            # study.ask() would add the attribute later, and a kill in between leave a trial that is nobody's.
            template = create_trial(state=TrialState.RUNNING, user_attrs={_OWN: trial})
            found = self._storage.create_new_trial(self._storage.get_study_id_from_name(STUDY), template)
        return optuna.Trial(study, found)


def _end(asked: FrozenTrial, state: SearchState) -> tuple[float | None] | None:
    """The metric's value, or that there is none; None: the trial is still under way."""
    number = asked.user_attrs[_OWN]
    chosen, trial = state.samples.get(number), state.trials.get(number)
    if chosen is None or trial is None:
        return None  # somebody asks just now
    if chosen["study_trial"] != asked.number:
        return (None,)  # somebody else asked, too, and was faster
    if trial.ended in (None, Exit.CANCELLED) and trial.value is None:
        return None
    return (None,) if trial.value is None or not math.isfinite(trial.value) else (trial.value,)


# --- the sampler


def _sampler(searcher: Mapping[str, Any], seed: int, trial: int, code: Path) -> BaseSampler:
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
    from optuna import samplers

    found = load_class(name, code) if ":" in name else getattr(samplers, name, None)
    if isinstance(found, type) and issubclass(found, samplers.BaseSampler):
        return found
    if ":" in name:
        raise UsageError(f"searcher.sampler: {name} is no subclass of optuna.samplers.BaseSampler")
    raise UsageError(no_such_sampler(name, samplers.__all__))


def no_such_sampler(name: str, names: Sequence[str]) -> str:
    """The sentence for a sampler that is none of optuna.samplers' `names`."""
    known = [each for each in names if each.endswith("Sampler") and each != "BaseSampler"]
    meant = nearest(name, known) or f"known: {', '.join(known)}"
    return f"searcher.sampler: optuna.samplers has no {name!r}; {meant}"


def sampler_names(optuna: Path) -> list[str]:
    """Of the package in this folder, without loading it: that takes a second. Nothing where its file lists none."""
    with suppress(OSError, ValueError):
        for node in ast.parse((optuna / "samplers" / "__init__.py").read_bytes()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
    return []


def _seeds(kind: type[BaseSampler], seed: int, trial: int) -> dict[str, Any]:
    """Of a sampler that is made for one trial: from the same seed each of them would draw the same."""
    from optuna.samplers import QMCSampler, RandomSampler

    if issubclass(kind, QMCSampler):  # its points are one sequence, which all workers share
        return {"seed": seed, "independent_sampler": RandomSampler((seed + trial) % 2**32)}
    return {"seed": (seed + trial) % 2**32}


# --- the space


def _suggested(space: Space, asked: Trial, path: str) -> Iterator[tuple[str, Any]]:
    """Each hyperparameter with its value; to Optuna nested ones have dotted names."""
    for name in sorted(space):
        spec, dotted = space[name], f"{path}{name}"
        if is_nested(spec):
            yield name, dict(_suggested(spec, asked, f"{dotted}."))
        elif kind_of(spec) == "const":
            yield name, constant(spec)
        else:
            yield name, _value(spec, asked, dotted)


def _value(spec: Mapping[str, Any], asked: Trial, name: str) -> Any:
    """A `count` is the grid's, and says nothing here."""
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
    """Values that Optuna cannot hold, such as lists, or cannot tell apart, as 1 and true, stand by their index."""
    if _is_plain(values):
        return asked.suggest_categorical(name, values)
    return values[asked.suggest_categorical(name, range(len(values)))]


def _is_plain(values: list[Any]) -> bool:
    are_scalars = all(isinstance(value, (str, int, float, bool, type(None))) for value in values)
    return are_scalars and len(set(values)) == len(values)
