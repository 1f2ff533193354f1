from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.report.comparison import comparison, hyperparameter_rows, setting_rows, winners
from hpc_det.report.facts import facts
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.cli.life import Life, random_search
from tests.facts import unnamed
from tests.report.searches import BEGAN
from tests.report.test_page import HOSTILE, Outline


def single(root: Path, value: float, title: str = "one", hyperparameters: Any = None, **searcher: Any) -> Life:
    life = Life.submitted(root, title=title, **searcher)
    if hyperparameters is not None:
        config = read_json(life.folder.effective) or {}
        write_json(life.folder.effective, {**config, "hyperparameters": hyperparameters})
    life.begins()
    life.reports("training", 50, {"loss": 1.0})
    life.reports("validation", 100, {"accuracy": value})
    life.finishes()
    return life


def search(root: Path, *values: float) -> Life:
    life = Life.submitted(root, title="several", **random_search(len(values)))
    for trial, value in enumerate(values, 1):
        life.begins()
        life.reports("validation", 100, {"accuracy": value}, trial=trial)
        life.reaches(value)
    return life


def all_facts(*lives: Life) -> list[dict[str, Any]]:
    return [facts(ExperimentView(life.folder), ExperimentState.COMPLETED, BEGAN + 1e6) for life in lives]


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def test_the_page_is_well_formed_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    shown = comparison(all_facts(single(tmp_path, 0.9), search(tmp_path, 0.5, 0.7)))
    outline = Outline(shown)
    assert outline.open == []
    assert "<title>Experiments 1, 2</title>" in shown
    assert not re.search(r"https?:|//[a-z]+\\.", shown)
    assert not {"src", "href", "style"} & {name for name, _ in outline.attributes}
    assert outline.tags.count("script") == outline.tags.count("style") == 1


def test_a_metric_of_all_experiments_is_one_picture_with_a_line_for_each_trial(tmp_path: Path) -> None:
    shown = section(comparison(all_facts(single(tmp_path, 0.9), search(tmp_path, 0.5, 0.7))), "curves")
    assert re.findall(r"<figcaption>([^<]+)", shown) == ["validation: accuracy", "training: loss"]
    picture = shown.partition("<svg")[2].partition("</svg>")[0]
    drawn = dict(re.findall(r'<path class="t curve ([^"]+)" data-t="([^"]+)"', picture))
    assert {line: classes for classes, line in drawn.items()} == {"1/1": "e0 best", "2/1": "e1 thin", "2/2": "e1 best"}
    assert len(re.findall(r"<title>2/2 several: lr: 0\.\d+, width: 64</title>", picture)) == 1


def test_the_result_that_wins_is_marked_if_the_metric_is_the_same(tmp_path: Path) -> None:
    found = all_facts(single(tmp_path, 0.9), search(tmp_path, 0.5, 0.7), single(tmp_path, 0.95))
    assert winners(found) == [2]
    assert section(comparison(found), "results").count('class="winner"') == 1
    other = all_facts(single(tmp_path, 0.9), single(tmp_path, 0.1, smaller_is_better=True))
    assert winners(other) == []


def test_hyperparameters_that_differ_are_highlighted_and_first(tmp_path: Path) -> None:
    found = all_facts(
        single(tmp_path, 0.9, hyperparameters={"lr": 0.1, "optimizer": {"name": "adam"}, "width": 64}),
        single(tmp_path, 0.8, hyperparameters={"lr": 0.2, "optimizer": {"name": "adam"}, "width": 64, "extra": True}),
    )
    rows = {row["name"]: (row["values"], row["differs"]) for row in hyperparameter_rows(found)}
    assert rows == {
        "extra": (["-", "true"], True),
        "lr": (["0.1", "0.2"], True),
        "optimizer.name": (["adam", "adam"], False),
        "width": (["64", "64"], False),
    }
    shown = section(comparison(found), "hyperparameters")
    names = re.findall(r"<tr( class=\"differs\")?><td><code>([^<]+)", shown)
    assert [(name, bool(marked)) for marked, name in names] == [
        ("extra", True),
        ("lr", True),
        ("optimizer.name", False),
        ("width", False),
    ]


def test_many_values_of_a_search_are_a_range(tmp_path: Path) -> None:
    found = all_facts(search(tmp_path, *(trial / 10 for trial in range(8))))
    ((values, _),) = [(row["values"], row["differs"]) for row in hyperparameter_rows(found) if row["name"] == "lr"]
    assert re.fullmatch(r"0\.\d+ to 0\.\d+", values[0])


def test_other_settings_are_shown_only_if_they_differ(tmp_path: Path) -> None:
    found = all_facts(single(tmp_path, 0.9), search(tmp_path, 0.5, 0.7))
    rows = {row["name"]: row["values"] for row in setting_rows(found)}
    assert rows["searcher.name"] == ["single", "random"]
    assert rows["searcher.max_trials"] == ["-", "2"]
    assert "searcher.metric" not in rows
    assert "name" not in rows


def test_more_experiments_than_colours_have_dashed_lines(tmp_path: Path) -> None:
    shown = comparison(all_facts(*(single(tmp_path, 0.5) for _ in range(9))))
    assert '<path class="t curve e0 dashed best" data-t="9/1"' in shown


def test_experiments_that_have_not_begun_have_a_page_too(tmp_path: Path) -> None:
    shown = comparison(all_facts(Life.submitted(tmp_path), Life.submitted(tmp_path)))
    assert Outline(shown).open == []
    assert 'id="curves"' not in shown


def test_whatever_a_name_a_hyperparameter_or_a_metric_holds_stays_text(tmp_path: Path) -> None:
    hyperparameters = {HOSTILE: {"type": "categorical", "vals": [HOSTILE]}}
    lives = [single(tmp_path, value, HOSTILE, hyperparameters, metric=HOSTILE) for value in (0.5, 0.6)]
    for life in lives:
        life.reports("validation", 200, {HOSTILE: 0.5})
    shown = comparison(all_facts(*lives))
    outline = Outline(shown)
    assert outline.open == []
    assert "img" not in outline.tags
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert outline.tags.count("script") == outline.tags.count("style") == 1
    assert not unnamed(shown, "&lt;img src=x onerror")


@pytest.mark.parametrize("refresh_s", [None, 5.0])
def test_only_a_page_that_is_updated_reloads_itself(tmp_path: Path, refresh_s: float | None) -> None:
    shown = comparison(all_facts(single(tmp_path, 0.9), single(tmp_path, 0.8)), refresh_s)
    assert ("data-refresh" in shown) == bool(refresh_s)
