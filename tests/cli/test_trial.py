"""hpc-det trial profile, and the line of it that describe shows."""

from __future__ import annotations

import csv
import io
import json

import pytest

from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.view.performance.profiles import gpus, sample, stretch


@pytest.fixture
def profiled(life: Life, scheduler: FakeScheduler) -> Life:
    """Of an experiment with 2 nodes of 2 ranks: ranks 0 and 1 are on the first, 2 and 3 on the other."""
    life.begins()
    for rank in range(4):
        loads_s = 5.4 if rank == 3 else 0.2
        stretch(
            life.trial,
            rank,
            host=f"n{rank // 2 + 1}",
            exposed_s=5.8 - loads_s,
            seconds={"dataloader_next": loads_s, "train_batch": 9.6 - loads_s},
        )
    for at in range(10):
        for node in (0, 1):
            sample(life.trial, node, at=at, host=f"n{node + 1}", gpus=gpus(aaaa=60.0 + at, bbbb=60.0))
    return life


def test_the_verdict_comes_with_its_share_the_rank_and_what_to_try(profiled: Life, hpc_det: Command) -> None:
    told = hpc_det("trial", "profile", "1/1")
    assert (told.code, told.err) == (0, "")
    heading, why, *rest = told.out.splitlines()
    assert heading == "Trial 1/1: data loader bound"
    assert why == "  54% of the time rank 3 on n2 waits for its data loader; the others wait for it 52% of their time"
    assert "      DataLoader(..., num_workers=3, persistent_workers=True)" in rest
    assert any("find what is different for rank 3 on n2" in line for line in rest)


def test_timings_are_a_table_with_the_rank_that_took_longest(profiled: Life, hpc_det: Command) -> None:
    lines = hpc_det("t", "profile", "1/1").out.splitlines()
    begin = lines.index("Timings of 100 batches on 4 ranks, 640 samples a second:") + 1
    rows = [line.split() for line in lines[begin : begin + 4]]
    assert rows == [
        ["TIMING", "MEAN", "SHARE", "A", "BATCH", "LONGEST", "OF", "RANK"],
        ["train_batch", "8.1", "s", "81%", "81", "ms", "9.4", "s", "0", "on", "n1"],
        ["exposed_communication", "4.3", "s", "43%", "43", "ms", "5.6", "s", "0", "on", "n1"],
        ["dataloader_next", "1.5", "s", "15%", "15", "ms", "5.4", "s", "3", "on", "n2"],
    ]


def test_metrics_of_nodes_and_gpus_are_a_table(profiled: Life, hpc_det: Command) -> None:
    rows = [line.split() for line in hpc_det("t", "profile", "1/1").out.splitlines()]
    assert ["n2", "-", "memory_free", *["8.0", "GiB"] * 3] in rows
    assert ["n1", "GPU-aaaa", "util", "64%", "60%", "69%"] in rows


def test_programs_get_all_of_it(profiled: Life, hpc_det: Command) -> None:
    found = json.loads(hpc_det("t", "profile", "1/1", "--json").out)
    assert (found["id"], found["verdict"], found["share"]) == (1, "data loader bound", pytest.approx(0.54))
    assert found["rank"] == {"rank": 3, "host": "n2"}
    assert sum(found["parts"].values()) == pytest.approx(10.0)
    assert [node["host"] for node in found["nodes"]] == ["n1", "n2"]


def test_a_spreadsheet_gets_a_row_for_each_measure(profiled: Life, hpc_det: Command) -> None:
    rows = list(csv.DictReader(io.StringIO(hpc_det("t", "profile", "1/1", "--csv").out)))
    by_name = {(row["measure"], row["host"], row["gpu"]): row for row in rows}
    assert len(by_name) == len(rows) == 5 + 2 * (7 + 2 * 2)
    assert by_name["dataloader_next", "n2", ""]["rank"] == "3"
    assert by_name["util", "n1", "GPU-bbbb"]["mean"] == "60.0"


def test_a_trial_that_was_not_measured_says_how_to(life: Life, hpc_det: Command, scheduler: FakeScheduler) -> None:
    life.begins()
    told = hpc_det("t", "profile", "1/1")
    assert told.code == 0
    assert told.out.startswith("Trial 1/1: not measured\n")
    assert told.out.endswith("      profiling.enabled: true\n")
    assert hpc_det("t", "profile", "1/1", "--csv").out == "measure,unit,host,gpu,mean,min,max,share,batch_s,rank\n"


def test_describe_shows_the_verdict_of_a_trial_that_was_profiled(
    profiled: Life, hpc_det: Command, scheduler: FakeScheduler
) -> None:
    for shown in (hpc_det("t", "describe", "1/1").out, hpc_det("e", "describe", 1).out):
        assert "\nProfile:\n  data loader bound: 54% of the time rank 3 on n2 waits" in shown
    described = json.loads(hpc_det("t", "describe", "1/1", "--json").out)
    assert described["profile"].startswith("data loader bound: ")


def test_describe_says_nothing_of_a_profile_that_is_not_there(
    life: Life, hpc_det: Command, scheduler: FakeScheduler
) -> None:
    life.begins()
    assert "Profile" not in hpc_det("t", "describe", "1/1").out
    assert json.loads(hpc_det("t", "describe", "1/1", "--json").out)["profile"] is None


def test_what_a_file_says_reaches_the_terminal_as_text(life: Life, hpc_det: Command, scheduler: FakeScheduler) -> None:
    life.begins()
    stretch(life.trial, host="n1\x1b[2J", seconds={"callbacks.\x1b]0;x\x07.on": 5.0})
    assert "\x1b" not in hpc_det("t", "profile", "1/1").out


def test_every_report_that_stands_is_a_row(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.reports("training", 100, {"loss": 0.5})
    life.reports("training", 200, {"loss": 0.25})
    life.trains_from(100)
    life.reports("validation", 150, {"accuracy": 0.75})
    rows = [line.split()[1:] for line in hpc_det("t", "describe", "1/1", "--metrics").out.splitlines()]
    assert rows == [
        ["ATTEMPT", "KIND", "BATCHES", "METRICS"],
        ["1", "training", "100", "loss", "0.5"],
        ["1", "validation", "150", "accuracy", "0.75"],
    ]
    records = json.loads(hpc_det("t", "describe", "1/1", "--metrics", "--json").out)
    assert [record["metrics"] for record in records] == [{"loss": 0.5}, {"accuracy": 0.75}]
    (first, second) = csv.DictReader(io.StringIO(hpc_det("t", "describe", "1/1", "--metrics", "--csv").out))
    assert (first["metrics.loss"], second["metrics.accuracy"]) == ("0.5", "0.75")
