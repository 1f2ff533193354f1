"""The page in a real browser, opened from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.report.facts import facts
from hpc_det.report.page import page
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.labs.chromium import Chromium
from tests.report.searches import BEGAN, lived
from tests.view.performance.profiles import profiled

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
