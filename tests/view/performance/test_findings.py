from __future__ import annotations

import pytest

from hpc_det.config.rank_variables import NO_WHOLE_BATCH
from hpc_det.view.performance.advice import TUNE_THROUGHPUT
from hpc_det.view.performance.findings import Finding, efficiency, findings
from hpc_det.view.performance.short_trainings import Throughput
from tests.facts import unnamed
from tests.view.performance.measurements import (
    BASELINE,
    FIRST_BATCH,
    OUT_OF_MEMORY,
    RARE,
    batches_of,
    failed,
    measured,
    on,
)
from tests.view.performance.test_limits import CONDITIONS


def findings_by_subject(*others: Throughput, baseline: Throughput | None = None) -> dict[str, Finding]:
    """Return the findings by subject."""
    return {finding.about: finding for finding in findings([baseline or measured(BASELINE, 100), *others], CONDITIONS)}


def settings(finding: Finding) -> list[str]:
    return [each.setting for each in finding.advice if each.setting]


def test_the_share_of_time_that_data_take_is_what_is_saved_without_loading_it() -> None:
    found = findings_by_subject(measured(FIRST_BATCH, 400), measured(RARE, 102))
    assert not unnamed(found["verdict"].text, "data loader bound", "75%")
    assert not unnamed(found["input"].text, "75%")
    assert "num_workers=6" in str(found["input"].advice[0].setting)
    assert TUNE_THROUGHPUT not in settings(found["input"])
    assert not unnamed(found["communication"].text, "bottleneck")
    assert found["communication"].advice == ()


def test_the_share_of_time_that_gradients_take_is_what_is_saved_without_exchanging_them() -> None:
    found = findings_by_subject(measured(FIRST_BATCH, 101), measured(RARE, 200))
    assert not unnamed(found["verdict"].text, "communication bound", "50%")
    assert {
        "hyperparameters.global_batch_size: 64",
        "optimizations.gradient_compression: true",
        "optimizations.auto_tune_tensor_fusion: true",
    } <= {*settings(found["communication"])}


def test_slots_that_neither_data_nor_gradients_hold_up_are_well_used() -> None:
    found = findings_by_subject(measured(FIRST_BATCH, 101), measured(RARE, 95))
    assert not unnamed(found["verdict"].text, "well used", "10%")
    assert not unnamed(found["communication"].text, "0%")


def test_a_measurement_that_failed_says_nothing() -> None:
    found = findings_by_subject(failed(FIRST_BATCH, "no"), failed(RARE, "no"))
    assert found.keys() == {"verdict"}
    assert found["verdict"].text.startswith("not known")


def test_the_largest_batch_that_fits_and_the_fastest_are_named() -> None:
    grown = [measured(batches_of(128), 180), measured(batches_of(256), 170), failed(batches_of(512), OUT_OF_MEMORY)]
    finding = findings_by_subject(*grown)["batch size"]
    assert not unnamed(finding.text, 128, "1.80 times 64", 256, 512)
    assert settings(finding) == ["hyperparameters.global_batch_size: 128"]


@pytest.mark.parametrize(
    ("last", "facts"),
    [
        (measured(batches_of(128), 101), ["128"]),
        (failed(batches_of(128), OUT_OF_MEMORY), ["memory", "128"]),
        (failed(batches_of(128), NO_WHOLE_BATCH), ["epoch"]),
        (failed(batches_of(128), "rank 0 on node1: ValueError"), ["128 failed"]),
    ],
)
def test_larger_batches_may_not_pay(last: Throughput, facts: list[str]) -> None:
    finding = findings_by_subject(last)["batch size"]
    assert finding.advice == ()
    assert not unnamed(finding.text, 64, *facts)


def test_efficiency_is_a_slots_throughput_beside_that_of_one_alone() -> None:
    found = [measured(BASELINE, 240), measured(on(1), 100), measured(on(2), 180), measured(RARE, 300)]
    assert [efficiency(one, found) for one in found] == [0.6, 1.0, 0.9, None]
    finding = findings_by_subject(*found[1:], baseline=found[0])["slots"]
    assert not unnamed(finding.text, "4 slots", "2.40 times", "60%")
    assert settings(finding)[0] == "resources.slots_per_trial: 2"


def test_slots_that_scale_well_need_no_advice() -> None:
    assert findings_by_subject(measured(on(1), 30), baseline=measured(BASELINE, 110))["slots"].advice == ()


def test_without_one_slot_alone_efficiency_is_not_known() -> None:
    found = [measured(BASELINE, 240), measured(on(2), 180), failed(on(1), "no")]
    assert [efficiency(one, found) for one in found] == [None, None, None]
    assert "slots" not in findings_by_subject(*found[1:], baseline=found[0])


def test_what_may_be_noise_is_no_verdict() -> None:
    found = findings_by_subject(
        measured(FIRST_BATCH, 140), measured(batches_of(128), 125), baseline=measured(BASELINE, 100, spread=0.3)
    )
    assert not unnamed(found["verdict"].text, "not known", "data loader bound", "noise")
    assert (found["input"].advice, unnamed(found["input"].text, "29%", "noise")) == ((), [])
    assert not unnamed(found["batch size"].text, 64)
    clear = findings_by_subject(measured(FIRST_BATCH, 400), baseline=measured(BASELINE, 100, spread=0.3))
    assert not unnamed(clear["verdict"].text, "data loader bound", "75%")


def test_what_varies_by_itself_is_said() -> None:
    assert "noise" not in findings_by_subject(baseline=measured(BASELINE, 100, spread=0.05))
    assert not unnamed(findings_by_subject(baseline=measured(BASELINE, 100, spread=0.3))["noise"].text, "30%")
