"""The page in a real browser, opened from its file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpc_det.node.files import write_atomic
from hpc_det.report.comparison import comparison
from hpc_det.report.facts import facts
from hpc_det.report.page import page
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.labs.chromium import Chromium, Tab
from tests.report.searches import BEGAN, lived
from tests.report.test_comparison import all_facts, search, single
from tests.view.performance.profiles import profiled
from tests.wait import wait_for

pytestmark = pytest.mark.integration

TRIALS = 24
PNG = b"\x89PNG\r\n\x1a\n"


def test_a_browser_shows_every_trial_and_has_nothing_to_complain_of(chromium: Chromium, tmp_path: Path) -> None:
    view = ExperimentView(lived(tmp_path / "root", TRIALS))
    profiled(view.folder.trial(7))
    text = page(facts(view, ExperimentState.COMPLETED, BEGAN + 1e6))
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(text)
    loaded = chromium.load(file, picture, fragment="#trial-7")
    assert loaded.console == []
    curves = loaded.dom.partition('id="curves"')[2].partition("</section>")[0]
    assert curves.count('class="t curve') == 3 * TRIALS
    highlighted = [part for part in loaded.dom.split("<") if ' on"' in part]
    assert len(highlighted) >= 3 + 1 + 1 + 1 + 3
    assert all('data-t="7"' in part for part in highlighted)
    assert '<output id="shown" aria-live="polite">Trial 7 · State COMPLETED · ' in loaded.dom
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 100_000

    foreign = '<img src="http://127.0.0.1:9/x.png" onerror="document.title = 1"><script>document.title = 2</script>'
    file.write_text(text.replace("<main>", f"<main>{foreign}"))
    assert len(chromium.load(file, picture).console) == 3, "the image, its handler and the script are refused"


def test_a_comparison_has_nothing_to_complain_of(chromium: Chromium, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(comparison(all_facts(single(tmp_path / "root", 0.9), search(tmp_path / "root", 0.5, 0.7))))
    loaded = chromium.load(file, tmp_path / "report.png", fragment="#trial-2/2")
    assert loaded.console == []
    assert '<output id="shown" aria-live="polite">Trial 2/2 · State COMPLETED · ' in loaded.dom


def test_an_experiment_of_another_user_can_be_pinned_and_named_in_the_url(chromium: Chromium, tmp_path: Path) -> None:
    found = all_facts(single(tmp_path / "root", 0.9), search(tmp_path / "root", 0.5, 0.7))
    found[1]["named"] = """/home/o'"ada x]:2"""
    file = tmp_path / "report.html"
    file.write_text(comparison(found))
    loaded = chromium.load(file, tmp_path / "report.png", fragment="""#trial-/home/o'"ada x]:2/2""")
    assert loaded.console == []
    assert """<output id="shown" aria-live="polite">Trial /home/o'"ada x]:2/2 · State COMPLETED · """ in loaded.dom


def test_curves_are_smoothed_as_tensorboard_does(chromium: Chromium, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(comparison(all_facts(single(tmp_path / "root", 0.9), search(tmp_path / "root", 0.5, 0.7))))
    with chromium.tab(file) as tab:
        until(tab, "typeof smoothed === 'function' && document.readyState === 'complete'")
        values = [1.0, 0.5, 0.0, 4.0]
        assert tab.evaluate(f"smoothed({values}, 0.6)") == pytest.approx(debiased(values, 0.6))
        assert tab.evaluate("smoothed([0.3, 0.3, 0.3], 0.9)") == [0.3, 0.3, 0.3]
        # a gap and a single point between two gaps; on a logarithmic axis, values and not pixels are averaged
        linear = tab.evaluate("smoothedPath('M0,10 1,20M4,30a2,2 0 1,0 4,0M9,40', 0.5, axis(undefined))")
        ys = debiased([10.0, 20.0, 30.0, 40.0], 0.5)
        assert linear == f"M0,{ys[0]:.1f} 1,{ys[1]:.1f}M4,{ys[2]:.1f}a2,2 0 1,0 4,0M9,{ys[3]:.1f}"
        logarithmic = tab.evaluate("smoothedPath('M0,200 1,100 2,0', 0.5, axis('1 100 200 0'))")
        pixels = [200 - 100 * math.log10(value) for value in debiased([1.0, 10.0, 100.0], 0.5)]
        assert logarithmic == "M0,{:.1f} 1,{:.1f} 2,{:.1f}".format(*pixels)
        assert tab.evaluate("smoothedPath('', 0.5, axis(undefined))") == "", "a curve without a finite value"
        before = tab.evaluate("document.querySelector('path.curve').getAttribute('d')")
        tab.evaluate("slide(0.9); slide(0)")
        assert tab.evaluate("document.querySelector('path.curve').getAttribute('d')") == before


def test_a_reload_keeps_what_the_reader_has_chosen(chromium: Chromium, tmp_path: Path) -> None:
    found = all_facts(single(tmp_path / "root", 0.9), search(tmp_path / "root", 0.5, 0.7))
    file = tmp_path / "report.html"
    file.write_text(comparison(found, refresh_s=1.0))
    with chromium.tab(file) as tab:
        until(tab, "typeof slide === 'function' && document.readyState === 'complete'")
        tab.evaluate("slide(0.5); pin('2/1'); scrollTo(0, 300)")
        write_atomic(file, comparison(found).replace("Comparison of", "Updated comparison of"))
        until(tab, "document.readyState === 'complete' && document.body.textContent.includes('Updated')")
        assert tab.evaluate("[slider.value, pinned, scrollY, document.documentElement.className]") == [
            "0.5",
            "2/1",
            300,
            "smoothed chosen",
        ]


def until(tab: Tab, condition: str) -> None:
    wait_for(lambda: tab.evaluate(condition), 60.0)


def debiased(values: list[float], weight: float) -> list[float]:
    """Return the exponential moving average, each value divided by the sum of its weights."""
    found = []
    for end in range(1, len(values) + 1):
        weights = [weight ** (end - 1 - place) for place in range(end)]
        found.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    return found
