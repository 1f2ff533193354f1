from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.report.facts import facts
from hpc_det.report.page import page
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.cli.life import Life, random_search
from tests.facts import unnamed
from tests.report.searches import BEGAN, lived

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = "</script></style><img src=x onerror=alert(1)>\"'&"


class Outline(HTMLParser):
    """Fails at tags that are not closed in order, and collects all tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def page_of(folder: ExperimentFolder, state: ExperimentState = ExperimentState.COMPLETED) -> str:
    return page(facts(ExperimentView(folder), state, BEGAN + 1e6))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(lived(tmp_path_factory.mktemp("root"), 24))


def test_the_page_is_well_formed_and_refers_to_nothing_outside(searched: str) -> None:
    outline = Outline(searched)
    assert outline.open == []
    assert not re.search(r"https?:|//[a-z]+\.", searched)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(outline.tags)
    assert not {"src", "href", "style"} & {name for name, _ in outline.attributes}


def test_only_the_pages_own_script_and_style_may_run(searched: str) -> None:
    (policy,) = (value for name, value in Outline(searched).attributes if value.startswith("default-src"))
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+'; base-uri 'none'; "
        r"form-action 'none'",
        policy,
    )


def test_every_picture_says_what_it_shows(searched: str) -> None:
    pictures = re.findall(r"<svg [^>]*role=\"img\"[^>]*><title>[^<]+</title>", searched)
    assert len(pictures) == searched.count("<svg ") == 3 + 2 + 1 + 2 + 3


def test_every_trial_is_in_every_picture_of_trials(searched: str) -> None:
    for trial in range(1, 25):
        assert searched.count(f'data-t="{trial}"') >= 3 + 1 + 1 + 1 + 3 + 2


def _hostile(life: Life, **config: Any) -> None:
    write_json(life.folder.effective, {**(read_json(life.folder.effective) or {}), **config})


def test_whatever_a_name_a_hyperparameter_a_metric_or_a_failure_holds_stays_text(tmp_path: Path) -> None:
    searcher: dict[str, Any] = {"name": "random", "max_trials": 2, "max_concurrent_trials": 0, "metric": HOSTILE}
    life = Life.submitted(tmp_path, title=HOSTILE, **searcher)
    _hostile(life, hyperparameters={HOSTILE: {"type": "categorical", "vals": [HOSTILE, "b", "c", "d"]}}, name=HOSTILE)
    for trial in (1, 2):
        life.begins()
        life.rank_prints(0, "starts\n", trial=trial)
        life.reports("validation", 100, {HOSTILE: 0.5 + trial}, trial=trial)
        life.journal.problem(1, HOSTILE)
        life.reaches(0.5 + trial)
    shown = page_of(life.folder)
    outline = Outline(shown)
    assert outline.open == []
    assert "img" not in outline.tags
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert outline.tags.count("script") == outline.tags.count("style") == 1
    assert "&lt;img src=x onerror" in shown


def test_an_experiment_that_has_not_begun_has_a_page_too(tmp_path: Path) -> None:
    shown = page_of(Life.submitted(tmp_path).folder, ExperimentState.QUEUED)
    assert Outline(shown).open == []
    assert not unnamed(shown, "trial", "started")


def test_a_trial_without_metrics_has_a_page_too(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    life.finishes()
    shown = page_of(life.folder)
    assert Outline(shown).open == []
    assert 'id="time"' in shown
    assert 'id="curves"' not in shown


def test_few_lines_are_named_with_the_hyperparameters_in_which_they_differ(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **random_search(2))
    for trial in (1, 2):
        life.begins()
        life.reports("validation", 100, {"accuracy": 0.5 + trial / 10}, trial=trial)
        life.reaches(0.5 + trial / 10)
    shown = page_of(life.folder)
    legend = shown.partition('<ul class="lines">')[2].partition("</ul>")[0]
    assert re.findall(r'data-t="(\d)"', legend) == ["2", "1"]  # the best first
    assert re.search(r"trial 2: lr: 0\.\d+ \(best\)", legend)
    assert len(re.findall(r"<title>trial 1: lr: 0\.\d+, width: 64</title>", shown)) >= 1


def test_many_lines_have_a_scale_of_colours_instead_of_a_legend(searched: str) -> None:
    assert '<ul class="lines">' not in searched
    assert "worst by accuracy" in searched


def test_only_a_page_that_is_updated_reloads_itself(tmp_path: Path) -> None:
    found = facts(ExperimentView(Life.submitted(tmp_path).folder), ExperimentState.RUNNING, BEGAN + 1e6)
    assert "data-refresh" not in page(found)
    updated = page(found, refresh_s=30.0)
    assert '<body data-refresh="30.0">' in updated
    assert not unnamed(updated, "reloads", "30")
