"""A script of the Trainer form as a rank of an attempt; the test is the agent at the other end of the connection."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_det.node.json_files import read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.search.state import best_trial
from hpc_det.store.attempt import first_failure
from hpc_det.store.metrics import read_reports, validations
from tests.facts import unnamed
from tests.pytorch.loop.test_rank import Agent, agent
from tests.pytorch.trials import CONFIG

__all__ = ["agent"]

pytestmark = pytest.mark.usefixtures("_fork_server")

SCRIPT = """
import sys

from hpc_det import pytorch
from hpc_det.errors import InvalidHP
from hpc_det.pytorch import Batch, Epoch, Trainer
from tests.pytorch.trials import Tiny

with pytorch.init(hparams={"global_batch_size": 1}, aggregation_frequency=AGGREGATION) as context:
    BEFORE
    trainer = Trainer(Tiny(context), context)
    trainer.fit(FIT)
    print("batch size", context.get_per_slot_batch_size(), "aggregation", context.aggregation_frequency)
    AFTER
print("the script went on")
"""
KEPT = CONFIG["checkpoint_storage"]
UNDER_A_LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1"}


def run(
    agent: Agent,
    fit: str = "",
    *,
    before: str = "",
    after: str = "",
    aggregation: int | None = None,
    variables: dict[str, str] = UNDER_A_LAUNCHER,
    ranks: int = 1,
    **config: Any,
) -> int:
    """Run a script with these arguments of `fit` and statements before and after it; return its exit code. Without a
    launcher's variables, it runs in a fresh process. `config`: sections of the experiment's configuration.
    """
    parts = {"BEFORE": before, "FIT": fit, "AFTER": after, "AGGREGATION": str(aggregation)}
    script = SCRIPT
    for name, text in parts.items():
        script = script.replace(name, text)
    (agent.code / "script.py").write_text(script)
    return agent.serve(["script.py"], variables, ranks=ranks, fresh="RANK" not in variables, **config)


def steps(agent: Agent, kind: str) -> list[int]:
    return [record["steps"] for record in read_reports(agent.trial.metrics) if record["kind"] == kind]


def losses(agent: Agent) -> dict[int, float]:
    """Return the searcher's metric of each validation, by the number of batches."""
    return validations(agent.trial.metrics, "loss")


def notes(agent: Agent) -> list[str]:
    return [line for line in agent.log.splitlines() if "note: " in line]


def test_length_hyperparameters_and_reports_are_the_experiments(agent: Agent) -> None:
    assert run(agent) == 0, agent.log
    assert agent.events == []
    assert read_json(agent.trial.outcome) == {"attempt": 1, "kind": "finished", "steps": 18, "saved": True}
    assert steps(agent, "training") == [4, 8, 12, 16, 18], "the scheduling unit is 4"
    assert agent.log.splitlines() == ["batch size 4 aggregation 1", "the script went on"]
    assert first_failure(agent.trial, 1) is None


def test_arguments_of_the_script_come_before_the_experiment_which_says_what_checkpoints_stay(agent: Agent) -> None:
    assert (KEPT["save_trial_best"], KEPT["save_trial_latest"]) == (1, 1)
    fit = "max_length=Batch(5), reporting_period=Batch(2), checkpoint_period=Batch(1)"
    done_already = "trainer.fit(max_length=Batch(3))"
    assert run(agent, fit, after=done_already, aggregation=2) == 0, agent.log
    assert steps(agent, "training") == [1, 2, 3, 4, 5], "before each checkpoint, too"
    assert next(line for line in agent.log.splitlines() if "note: " not in line) == "batch size 4 aggregation 2"
    assert read_json(agent.trial.outcome) == {"attempt": 1, "kind": "finished", "steps": 5, "saved": True}
    assert len([*agent.trial.checkpoints.glob("*/manifest.json")]) == 1, "the newest of the five is also the best"


ONE_OF_HALVING = {
    **CONFIG["searcher"],
    "name": "async_halving",
    "max_trials": 1,
    "num_rungs": 2,
    "divisor": 2,
    "stop_once": True,
    "max_length": {"batches": 8},
}
"""A search that compares its one trial at 4 batches, and ends it at 8."""


@pytest.mark.parametrize(
    ("given", "validations", "facts"),
    [
        ("Batch(6)", [4, 6], ("Batch(value=6)", "Batch(value=8)")),
        ("Epoch(1)", [4, 6], ("Epoch(value=1)", "Batch(value=8)")),
        ("Batch(4)", [4], ("Batch(value=4)", "Batch(value=8)")),
        ("Batch(3)", [3], ("Batch(value=3)", "Batch(value=8)")),
        ("Batch(100)", [4, 8], ("Batch(value=100)", "Batch(value=8)")),
        ("Batch(8)", [4, 8], None),
    ],
)
def test_a_halving_search_and_a_script_that_says_a_length_train_to_the_smaller_one(
    agent: Agent, given: str, validations: list[int], facts: tuple[str, str] | None
) -> None:
    assert run(agent, f"max_length={given}", searcher=ONE_OF_HALVING) == 0, agent.log
    assert steps(agent, "validation") == validations
    assert read_json(agent.trial.outcome) == {
        "attempt": 1,
        "kind": "finished",
        "steps": validations[-1],
        "saved": True,
    }
    search = SearchJournal(agent.experiment)
    best, values = best_trial(search.new(), search.searcher), losses(agent)
    assert best
    assert best.length
    assert (values[best.length.amount], best.length.unit) == (best.value, "batches")
    assert best.value == min(values.values())
    state = search.state()
    assert (state.finished, state.method.is_closed(1)) == (True, True)
    assert [unnamed(note, "fit: ", "max_length", *(facts or ())) for note in notes(agent)] == ([[]] if facts else [])


@pytest.mark.parametrize("unit", [{"batches": 16}, {"epochs": 3}, {"records": 64}])
def test_the_length_of_a_script_replaces_that_of_a_search_without_comparisons_in_the_report_too(
    agent: Agent, unit: dict[str, int]
) -> None:
    searcher = {**CONFIG["searcher"], "name": "random", "max_trials": 1, "max_length": unit}
    assert run(agent, "max_length=Batch(5), validation_period=Batch(2)", searcher=searcher) == 0, agent.log
    search = SearchJournal(agent.experiment)
    best = best_trial(search.new(), search.searcher)
    assert best
    assert (best.length, best.value) == ((5, "batches"), losses(agent)[5])
    assert [unnamed(note, "Batch(value=5)", "searcher.max_length", "random") for note in notes(agent)] == [[]]


CUSTOM = """
from hpc_det.search.method import FixedSearch

class Recording(FixedSearch):
    def __init__(self, max_trials, max_length, smaller_is_better, seed):
        super().__init__(max_trials, max_length)
        self.values = {}

    def report(self, trial, value):
        super().report(trial, value)
        self.values[trial] = value
"""


@pytest.mark.parametrize(("given", "length"), [("Batch(5)", 5), ("Batch(100)", 8)])
def test_a_search_of_the_user_gets_the_value_at_the_smaller_length(agent: Agent, given: str, length: int) -> None:
    (agent.code / "own_search.py").write_text(CUSTOM)
    searcher = {
        **CONFIG["searcher"],
        "name": "custom",
        "class": "own_search:Recording",
        "settings": {},
        "max_trials": 1,
        "max_length": {"batches": 8},
    }
    assert run(agent, f"max_length={given}", searcher=searcher) == 0, agent.log
    assert steps(agent, "validation") == [length]
    search = SearchJournal(agent.experiment)
    best = best_trial(search.new(), search.searcher)
    assert best
    assert (best.length, best.value) == ((length, "batches"), losses(agent)[length])
    method: Any = search.state().method
    assert method._method.values == {1: best.value}
    assert [unnamed(note, "Batch(value=8)", "custom") for note in notes(agent)] == [[]]


def test_the_variable_of_a_test_shortens_what_a_script_says(agent: Agent) -> None:
    assert run(agent, "max_length=Batch(500)", variables={**UNDER_A_LAUNCHER, "HPC_DET_TEST": "1"}) == 0, agent.log
    assert (steps(agent, "training"), steps(agent, "validation")) == ([1], [1])


def test_a_script_that_is_the_entrypoint_itself_is_the_rank_of_its_node(agent: Agent) -> None:
    assert run(agent, variables={}) == 0, agent.log
    assert read_json(agent.trial.outcome) == {"attempt": 1, "kind": "finished", "steps": 18, "saved": True}


def test_more_slots_need_a_launcher(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(agent, variables={}, ranks=2) == 1
    facts = ["entrypoint: ", "2 slots", "`python3 -m hpc_det.launch.torch_distributed`"]
    assert unnamed(agent.failure.message, *facts) == []
    assert agent.failure.user_error
    assert agent.failure.rank is None
    assert agent.failure.message in capfd.readouterr().err


def test_an_error_is_noted_with_its_traceback_and_goes_through(agent: Agent) -> None:
    assert run(agent, after="raise ArithmeticError('of the script')") == 1
    assert agent.failure.message == "ArithmeticError: of the script"
    assert not agent.failure.user_error
    assert 'script.py", line ' in agent.failure.traceback
    assert agent.log.splitlines()[-1].endswith("ArithmeticError: of the script")
    assert agent.events == [("lost", 0)], "no goodbye: the line ends with the process"


def test_impossible_hyperparameters_are_nothing_to_start_again_for(agent: Agent) -> None:
    assert run(agent, before="raise InvalidHP('too wide')") == 1
    assert agent.failure.message == "too wide"
    assert agent.failure.user_error


def test_a_test_inside_a_job_is_refused(agent: Agent) -> None:
    assert run(agent, "test_mode=True") == 1
    assert unnamed(agent.failure.message, "fit: ", "test_mode", "--test") == []


@pytest.mark.parametrize(("code", "events"), [(0, []), (3, [("lost", 0)])])
def test_a_script_may_leave_inside_the_block(agent: Agent, code: int, events: list[object]) -> None:
    assert run(agent, after=f"sys.exit({code})") == code
    assert agent.events == events
    assert (first_failure(agent.trial, 1) is None) == (code == 0)
    assert agent.log.splitlines()[-1].startswith("batch size")
