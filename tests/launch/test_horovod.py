"""The Horovod launcher with a stand-in for horovodrun: Horovod cannot be installed beside this PyTorch."""

from __future__ import annotations

import sys

import pytest

from hpc_det.launch.horovod import horovodrun_command, without_auto
from hpc_det.launch.launchers.arguments import Launch
from hpc_det.store.attempt import first_failure
from tests.facts import unnamed
from tests.launch.gang import Gang
from tests.store.test_attempt import ATTEMPT
from tests.stub import Stub
from tests.wait import DEADLINE_S

HOROVODRUN = """
echo "$@" >horovodrun.words
while [[ $1 != *python* ]]; do shift; done
for rank in 0 1; do HOROVOD_RANK=$rank "$@" & done
wait
"""


def test_horovodrun_is_told_our_flags_the_overrides_and_what_each_rank_runs() -> None:
    launch = Launch(("--fusion-threshold-mb", "1"), ("train.py", "--lr", "1"))
    assert horovodrun_command(launch, ATTEMPT, "ib0") == [
        *("horovodrun", "-np", "8", "-H", "localhost:4", "--start-timeout", "1200"),
        *("--network-interface", "ib0", "--fusion-threshold-mb", "1"),
        *(sys.executable, "-m", "hpc_det.launch.wrap_rank", "HOROVOD_RANK,OMPI_COMM_WORLD_RANK,PMI_RANK", "--"),
        *(sys.executable, "train.py", "--lr", "1"),
    ]


@pytest.mark.parametrize(
    ("line", "rest", "is_auto"),
    [
        ("--autohorovod s", "s", True),
        ("s --autohorovod", "s --autohorovod", False),
        ("-- --autohorovod s -- a", "-- s -- a", True),
        ("o1 -- --autohorovod --trial m:C", "o1 -- --trial m:C", True),
        ("--autohorovod -- s", "--autohorovod -- s", False),
    ],
)
def test_the_flag_belongs_to_the_launcher_where_the_script_could_begin(line: str, rest: str, is_auto: bool) -> None:
    assert without_auto(line.split()) == (rest.split(), is_auto)


@pytest.mark.integration
def test_each_line_carries_the_rank_that_horovodrun_gave(gang: Gang, stub: Stub) -> None:
    stub("horovodrun", HOROVODRUN)
    gang.plan("exec $PYTHON -m hpc_det.launch.horovod --cycle-time-ms 2 -- echo $USE_HOROVOD trained")
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 0
    assert sorted(gang.printed.read_text().splitlines()) == ["[rank=0] trained", "[rank=1] trained"]
    assert "-np 2 -H localhost:2 --start-timeout 1200 --cycle-time-ms 2" in (gang.code / "horovodrun.words").read_text()


@pytest.mark.integration
def test_without_horovod_there_is_nothing_to_start_again_for(gang: Gang) -> None:
    gang.plan([sys.executable, "-m", "hpc_det.launch.horovod", "train.py"])
    assert gang.start_agent().wait(timeout=DEADLINE_S) == 1
    failure = first_failure(gang.trial, 1)
    assert failure is not None
    assert failure.user_error
    assert unnamed(failure.message, "hpc_det.launch.horovod: ", "horovodrun", "horovod") == []
