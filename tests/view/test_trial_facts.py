"""The facts of a trial have one source: describe, the report and top show the same values."""

from __future__ import annotations

from hpc_det.cli.describe_trial import as_json
from hpc_det.cli.top.experiments import UnderWay
from hpc_det.report.facts import trial_record
from hpc_det.requeue import Action, Cause
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_facts import trials_of
from tests.cli.life import Life


def test_describe_the_report_and_top_show_the_same_facts(life: Life) -> None:
    life.begins()
    life.reports("training", 50, {"loss": 0.5})
    life.reports("validation", 50, {"accuracy": 0.8})
    life.saves(50)
    life.ends(Cause.PREEMPTED, Action.REQUEUE)
    life.begins()
    view = ExperimentView(life.folder)
    (facts,) = trials_of(view, ExperimentState.RUNNING)
    described, reported, row = as_json(facts), trial_record(facts, [], 0.0), UnderWay(view).row([])
    assert described["state"] == reported["state"] == "RUNNING"
    assert described["hyperparameters"] == reported["hyperparameters"] == facts.hparams
    assert described["batches"] == reported["batches"] == row.summary.batches == 50
    assert len(described["attempts"]) == len(reported["attempts"]) == row.attempts == 2
    assert described["best"] == row.summary.best == {**reported["best"], "trial": 1}
    assert (described["training"], described["validation"]) == (row.training, row.validation)
