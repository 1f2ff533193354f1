from __future__ import annotations

import pytest

from hpc_det.sgd.operator.progress import Bar
from tests.sgd.operators import Classifier, batches, classifier


def test_rank_0_shows_a_bar_with_the_last_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    operator = classifier(use_tqdm=True)
    operator.train_epoch(iter(batches(2, 2)), {"epoch_idx": 1, "num_epochs": 10, "__num_steps__": 2})
    shown = capsys.readouterr().err
    assert "2/10e" in shown
    assert "0/2" in shown


def test_without_num_steps_the_length_is_that_of_the_iterator(capsys: pytest.CaptureFixture[str]) -> None:
    classifier(use_tqdm=True).train_epoch(batches(2, 2, 2), {})
    shown = capsys.readouterr().err
    assert "1e:" in shown
    assert "0/3" in shown


def test_a_bar_shows_metrics_when_it_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("1e", 2)
    bar._bar.mininterval = 0  # seconds
    with bar:
        bar.advance({"train_loss": 0.25, "note": "text"})
    assert "train_loss=0.25" in capsys.readouterr().err


def test_other_ranks_and_a_false_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Classifier({}, 1, 1, use_tqdm=True).train_epoch(batches(2))
    classifier().train_epoch(batches(2))
    assert capsys.readouterr().err == ""
