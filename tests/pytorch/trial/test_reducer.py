from __future__ import annotations

import copy
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hpc_det.checkpoint.content import load
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch import PyTorchTrialContext
from hpc_det.pytorch.trial.reducer import MetricReducer, Reducers
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed, warned
from tests.pytorch.trials import Life, Tiny

ALONE = Distributed()


class Average(MetricReducer):
    """The average of all records; a reset changes its state in place."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)
        self.counts: list[int] = []

    def update(self, values: torch.Tensor) -> None:
        self.total += values.sum()
        self.counts.append(len(values))

    def reset(self) -> None:
        self.total.zero_()
        self.counts.clear()

    def per_slot_reduce(self) -> tuple[torch.Tensor, int]:
        return self.total, sum(self.counts)

    def cross_slot_reduce(self, per_slot_metrics: list[tuple[torch.Tensor, int]]) -> Any:
        totals, counts = zip(*per_slot_metrics, strict=True)
        return sum(totals) / sum(counts)


def collected(values: list[Any]) -> str:
    return " ".join(map(str, values))


# --- rules of wrapping


def test_a_function_becomes_a_reducer_and_a_reducer_stays_itself() -> None:
    reducers, mine = Reducers(), Average()
    assert reducers.wrap(mine, "mine") is mine
    assert isinstance(reducers.wrap(collected, "function"), MetricReducer)


def test_a_reducer_is_wrapped_once_and_a_function_as_often_as_wanted() -> None:
    reducers, mine = Reducers(), Average()
    reducers.wrap(mine, "a", for_validation=False)
    with refused(UsageError, "wrap_reducer: ", "Average", "already"):
        reducers.wrap(mine, "b", for_training=False)
    assert reducers.wrap(collected, "c") is not reducers.wrap(collected, "b")


@pytest.mark.parametrize("wrong", [Average, "auc", None, 7])
def test_what_is_neither_function_nor_reducer_is_told_so(wrong: Any) -> None:
    with refused(UsageError, "wrap_reducer: ", repr(wrong), "MetricReducer"):
        Reducers().wrap(wrong, "auc")


def test_a_reducer_serves_something() -> None:
    with refused(UsageError, "reducer collected for metric 'a'", "training", "validation"):
        Reducers().wrap(collected, "a", for_training=False, for_validation=False)


def function_giving(result: Any) -> Callable[[list[Any]], Any]:
    def metric(values: list[Any]) -> Any:
        return result

    return metric


@pytest.mark.parametrize(
    ("name", "result", "facts"),
    [
        (None, 0.5, ["reducer metric: ", "float", "dict", "name=..."]),
        ("a", {"b": 1}, ["reducer metric for metric 'a': ", "dict", ["b"]]),
    ],
)
def test_a_dict_comes_without_a_name_and_one_metric_with_one(
    name: str | None, result: Any, facts: list[object]
) -> None:
    reducers = Reducers()
    reducers.wrap(function_giving(result), name)
    with refused(UsageError, *facts):
        reducers.reduce(ALONE, training=True)


# --- results


@pytest.mark.parametrize("number", [2, True, np.float32(0.5), torch.tensor([0.25]), np.array(3)])
def test_numbers_of_any_kind_become_floats(number: Any) -> None:
    reducers = Reducers()
    reducers.wrap(function_giving(number), "named")
    reducers.wrap(function_giving({"one": number, "other": [number]}))
    metrics = reducers.reduce(ALONE, training=True)
    assert metrics == {"named": float(number), "one": float(number), "other": [number]}
    assert type(metrics["named"]) is type(metrics["one"]) is float


def test_without_reducers_no_rank_waits_for_another() -> None:
    two = Distributed(rank=1, size=2)  # a collective would fail, because there is no process group
    assert Reducers().reduce(two, training=True) == {}
    only_training = Reducers()
    only_training.wrap(collected, "a", for_validation=False)
    assert only_training.reduce(two, training=False) == {}


class Pair(NamedTuple):
    left: Any
    right: Any


def test_updates_keep_no_graph() -> None:
    seen: list[Any] = []
    reducers = Reducers()
    reducer: Any = reducers.wrap(lambda updates: seen.extend(updates) or 0.0, "seen")  # type: ignore[func-returns-value]
    tensor = torch.ones(2, requires_grad=True) * 2
    reducer.update(tensor)
    reducer.update({"a": [tensor, "text"], "b": Pair(tensor, 1)})
    reducers.reduce(ALONE, training=True)
    first, second = seen
    assert type(second["b"]) is Pair
    assert not any(part.requires_grad for part in (first, second["a"][0], second["b"].left))


def test_each_stretch_has_its_own_updates() -> None:
    reducers = Reducers()
    both: Any = reducers.wrap(collected, "both")
    training: Any = reducers.wrap(collected, "training", for_validation=False)
    validation: Any = reducers.wrap(collected, "validation", for_training=False)
    for value in (1, 2):
        both.update(value)
        training.update(value)
    assert reducers.reduce(ALONE, training=True) == {"both": "1 2", "training": "1 2"}
    reducers.reset(training=True)
    assert reducers.reduce(ALONE, training=True) == {"both": "", "training": ""}
    training.update(3)
    both.update(4)
    validation.update(5)
    reducers.reset(training=False)
    validation.update(6)
    assert reducers.reduce(ALONE, training=False) == {"both": "", "validation": "6"}
    assert reducers.reduce(ALONE, training=True) == {"both": "", "training": "3"}


def with_validation_in_between(distributed: Distributed) -> list[dict[str, Any]]:
    """Return the metrics of a validation within a training window, and those of the training window."""
    reducers = Reducers()
    average = Average()
    reducers.wrap(average, "average")
    order: Any = reducers.wrap(collected, "order")
    rank = distributed.rank

    def update(value: int) -> None:
        average.update(torch.tensor([value + 10.0 * rank]))
        order.update(f"{value}:{rank}")

    for value in (1, 2):
        update(value)
    with reducers.set_aside():
        reducers.reset(training=False)
        update(7)
        validation = reducers.reduce(distributed, training=False)
    update(3)
    return [validation, reducers.reduce(distributed, training=True)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_validation_in_mid_stretch_takes_nothing_from_training_and_leaves_nothing(
    on_ranks: OnRanks, size: int
) -> None:
    def ordered(*values: int) -> str:
        return " ".join(f"{value}:{rank}" for value in values for rank in range(size))

    shift = 10.0 * sum(range(size)) / size
    expected = [{"average": 7 + shift, "order": ordered(7)}, {"average": 2 + shift, "order": ordered(1, 2, 3)}]
    assert on_ranks(size, with_validation_in_between) == [expected] * size


class Abandoned(BaseException):
    pass


def test_training_goes_on_after_a_validation_that_was_abandoned() -> None:
    reducers = Reducers()
    reducer: Any = reducers.wrap(collected, "order")
    reducer.update(1)

    def validate() -> None:
        with reducers.set_aside():
            reducers.reset(training=False)
            raise Abandoned

    with pytest.raises(Abandoned):
        validate()
    assert reducers.reduce(ALONE, training=True) == {"order": "1"}


# --- ranks


def reduced_together(distributed: Distributed, batches: int) -> dict[str, Any]:
    """Reduce batches that are distributed as in the loop: global batch k is on rank k % size."""
    reducers = Reducers()
    order: Any = reducers.wrap(collected, "order")
    average = reducers.wrap(Average(), "average")
    assert isinstance(average, Average)
    several: Any = reducers.wrap(lambda values: {"first": values[0], "updates": len(values)})
    for batch in range(distributed.rank, batches, distributed.size):
        order.update(batch)
        average.update(torch.full((batch + 1,), float(batch)))
        several.update({"batch": torch.tensor(batch), "rank": np.array([distributed.rank])})
    metrics = reducers.reduce(distributed, training=True)
    return {**metrics, "first": metrics["first"]["batch"].item()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batches", [7, 9])
def test_every_rank_gets_the_metrics_of_all_batches_in_their_order(on_ranks: OnRanks, size: int, batches: int) -> None:
    records = sum(batch + 1 for batch in range(batches))
    average = sum(batch * (batch + 1) for batch in range(batches)) / records
    expected = {
        "order": " ".join(map(str, range(batches))),
        "average": pytest.approx(average),
        "first": 0,
        "updates": batches,
    }
    assert on_ranks(size, reduced_together, batches) == [expected] * size


class Failing(Average):
    """Fails on one rank, in one of its steps."""

    def __init__(self, rank: int, own: int, step: str) -> None:
        super().__init__()
        self._fails = step if rank == own else ""

    def per_slot_reduce(self) -> Any:
        if self._fails == "slot":
            raise NeverPickled(lambda: 0)
        return super().per_slot_reduce()

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        if self._fails == "cross":
            raise NeverPickled(lambda: 0)
        return 1.0 if self._fails != "name" else {"a": 1.0}


class NeverPickled(Exception):
    def __str__(self) -> str:
        return "as told"


def failure_of(distributed: Distributed, failing: int, step: str) -> tuple[str, str, Any]:
    """Return the error on this rank, and the result of another reducer afterwards."""
    reducers = Reducers()
    reducers.wrap(Failing(failing, distributed.rank, step), "metric")
    with pytest.raises(Exception) as error:  # noqa: PT011
        reducers.reduce(distributed, training=True)
    reducers = Reducers()
    reducers.wrap(collected, "after")
    return type(error.value).__name__, str(error.value), reducers.reduce(distributed, training=True)


@pytest.mark.parametrize(("failing", "step"), [(1, "slot"), (0, "slot"), (0, "cross")])
def test_a_failure_on_one_rank_is_an_error_on_all(on_ranks: OnRanks, failing: int, step: str) -> None:
    seen = on_ranks(2, failure_of, failing, step)
    assert seen[failing] == ("NeverPickled", "as told", {"after": ""})
    said = f"a metric reducer failed on rank {failing}: NeverPickled: as told"
    assert seen[1 - failing] == ("HpcDetError", said, {"after": ""})


def test_a_broken_rule_of_names_is_the_same_error_on_every_rank(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, failure_of, 0, "name")
    assert first == second
    assert first[0] == "UsageError"
    assert unnamed(first[1], "reducer Failing for metric 'metric': ", "dict", ["a"], "wrap_reducer") == []


# --- resumes


class Everything(MetricReducer):
    """Has all kinds of state that are saved without methods for it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.tensor = torch.zeros(2, dtype=torch.float64)
        self.array = np.zeros(2)
        self.updates: list[Any] = []
        self.newest: deque[float] = deque(maxlen=2)
        self.of: defaultdict[str, list[float]] = defaultdict(list)

    def update(self, value: float) -> None:
        self.tensor += value
        self.array += value
        self.updates.append((value, {"text": str(value)}))
        self.newest.append(value)
        self.of["even" if value % 2 == 0 else "odd"].append(value)

    def per_slot_reduce(self) -> Any:
        return [self.tensor, self.array.tolist(), self.updates, list(self.newest), dict(self.of)]

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return str(per_slot_metrics)


def saved(reducers: Reducers, folder: Path) -> list[dict[str, Any]]:
    """Return the state as a checkpoint contains it."""
    torch.save(reducers.state(), folder / "reducers.pth")
    state: list[dict[str, Any]] = load(folder / "reducers.pth")
    return state


def everything() -> tuple[Reducers, Callable[[float], None]]:
    reducers, every = Reducers(), Everything()
    reducers.wrap(every, "every")
    order: Any = reducers.wrap(collected, "order")

    def update(value: float) -> None:
        every.update(value)
        order.update(value)

    return reducers, update


def test_a_stretch_that_was_cut_by_a_checkpoint_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    undisturbed, update = everything()
    cut, update_cut = everything()
    for value in (1.0, 2.0, 3.0):
        update(value)
        update_cut(value)
    resumed, update_resumed = everything()
    resumed.restore(saved(cut, tmp_path))
    for value in (4.0, 5.0):
        update(value)
        update_resumed(value)
    assert resumed.reduce(ALONE, training=True) == undisturbed.reduce(ALONE, training=True)


def test_reducers_for_validation_have_no_open_stretch() -> None:
    reducers = Reducers()
    reducers.wrap(collected, "a", for_training=False)
    assert reducers.state() == []


def resumed_on_two(distributed: Distributed, states: list[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Restore the state of a gang of three on rank 0; return the metrics of that window and of the next one."""
    reducers = Reducers()
    average = Average()
    reducers.wrap(average, "average")
    count: Any = reducers.wrap(len, "updates")
    if distributed.is_chief:
        reducers.restore(*states)
    state = copy.deepcopy(reducers.state())
    average.update(torch.tensor([10.0]))
    count.update(1)
    first = reducers.reduce(distributed, training=True)
    reducers.reset(training=True)
    average.update(torch.tensor([3.0]))
    return [first, reducers.reduce(distributed, training=True)], state


def test_a_gang_of_another_size_counts_what_the_former_had_begun(on_ranks: OnRanks, tmp_path: Path) -> None:
    states = []
    for value in (1.0, 2.0, 3.0):
        reducers, average = Reducers(), Average()
        reducers.wrap(average, "average")
        count: Any = reducers.wrap(len, "updates")
        average.update(torch.full((2,), value))
        count.update(1)
        states.append(saved(reducers, tmp_path))
    expected = [{"average": 32.0 / 8, "updates": 5.0}, {"average": 3.0, "updates": 0.0}]
    (metrics, state), (metrics_of_1, state_of_1) = on_ranks(2, resumed_on_two, states)
    assert metrics == metrics_of_1 == expected
    again = on_ranks(2, resumed_on_two, [state, state_of_1])
    assert [metrics for metrics, _ in again] == [expected] * 2, "a second resume in the same stretch"


def test_another_number_of_reducers_is_an_error() -> None:
    reducers, _ = everything()
    with refused(HpcDetError, 1, "reducers", "training", 2):
        reducers.restore([{}])


class Unusual(Average):
    """Has attributes that a checkpoint cannot contain."""

    def __init__(self) -> None:
        super().__init__()
        self.where = Path("/")
        self.model = torch.nn.Linear(1, 1)


def test_what_a_checkpoint_cannot_hold_is_left_out_with_a_warning(tmp_path: Path) -> None:
    reducers, unusual = Reducers(), Unusual()
    reducers.wrap(unusual, "mine")
    unusual.update(torch.tensor([1.0, 2.0]))
    with warned(UserWarning, "Unusual", "model, where", "state_dict", "load_state_dict"):
        (state,) = saved(reducers, tmp_path)
    assert state["updates"].keys() == {"total", "counts"}
    resumed, another = Reducers(), Unusual()
    resumed.wrap(another, "mine")
    model = another.model
    resumed.restore([state])
    assert another.model is model
    assert resumed.reduce(ALONE, training=True) == {"mine": 1.5}


def test_updates_that_a_checkpoint_cannot_hold_are_left_out_and_yet_set_aside(tmp_path: Path) -> None:
    reducers = Reducers()
    reducer: Any = reducers.wrap(collected, "order")
    reducer.update(Path("a"))
    with reducers.set_aside():
        reducers.reset(training=False)
    assert reducers.reduce(ALONE, training=True) == {"order": "a"}
    with warned(UserWarning, "reducer collected for metric 'order': ", "updates"):
        (state,) = saved(reducers, tmp_path)
    resumed = Reducers()
    resumed.wrap(collected, "order")
    resumed.restore([state])
    assert resumed.reduce(ALONE, training=True) == {"order": ""}


class Own(Unusual):
    """Implements state_dict and load_state_dict."""

    def state_dict(self) -> dict[str, Any]:
        return {"sum": float(self.total), "where": str(self.where)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total.fill_(state_dict["sum"])
        self.where = Path(state_dict["where"])


def test_a_reducers_own_state_is_used_for_checkpoints_and_validations(tmp_path: Path) -> None:
    reducers, own = Reducers(), Own()
    reducers.wrap(own, "mine")
    own.update(torch.tensor([1.0]))
    own.where = Path("/there")
    with reducers.set_aside():
        own.reset()
        own.where = Path("/elsewhere")
    assert (own.total.item(), own.where) == (1.0, Path("/there"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (state,) = saved(reducers, tmp_path)
    assert state["updates"] == {"sum": 1.0, "where": "/there"}


# --- names


def test_two_reducers_of_one_name_are_an_error_where_they_meet() -> None:
    reducers = Reducers()
    reducers.wrap(sum, "total", for_validation=False)
    reducers.wrap(max, "total", for_training=False)
    with refused(UsageError, "'total'"):
        reducers.wrap(min, "total")
    reducers.wrap(min, "least")


def test_two_reducers_that_return_one_metric_are_an_error() -> None:
    reducers = Reducers()
    reducers.wrap(lambda updates: {"total": 1})
    reducers.wrap(lambda updates: {"total": 2})
    with refused(UsageError, "both", "'total'"):
        reducers.reduce(Distributed(), training=True)


class Shadowing(Tiny):
    """A reducer has the same name as a metric of batches."""

    where = "training"

    def __init__(self, context: PyTorchTrialContext) -> None:
        super().__init__(context)
        training = self.where == "training"
        context.wrap_reducer(len, "loss", for_training=training, for_validation=not training)


class ShadowingValidation(Shadowing):
    where = "validation"


@pytest.mark.parametrize(("trial", "source"), [(Shadowing, "train_batch"), (ShadowingValidation, "evaluate_batch")])
def test_a_reducer_never_replaces_a_metric_of_batches(tmp_path: Path, trial: type[Tiny], source: str) -> None:
    with refused(UsageError, source, "reducer", "'loss'"):
        Life.begin(tmp_path, trial).attempt()
