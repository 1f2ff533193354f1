from __future__ import annotations

import pytest

from hpc_det.schedulers.pbs.answers import from_pbs, to_pbs
from hpc_det.schedulers.scheduler import array_of
from tests.facts import refused


@pytest.mark.parametrize(
    ("pbs_id", "job_id"),
    [
        ("12.pbshead", "12"),
        ("12[3].pbs.example.org", "12_3"),
        ("12[].pbshead\n", "12"),
        ("12", "12"),
        ("12[3]", "12_3"),
    ],
)
def test_the_server_is_left_out_and_an_index_stands_behind_a_line(pbs_id: str, job_id: str) -> None:
    assert from_pbs(pbs_id) == job_id


@pytest.mark.parametrize("text", ["", "qsub: waiting", "Submitted batch job 12", "[3].pbshead", "12[a].pbshead"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with refused(ValueError, repr(text)):
        from_pbs(text)


@pytest.mark.parametrize("pbs_id", ["12", "12[3]"])
def test_an_id_comes_back(pbs_id: str) -> None:
    assert to_pbs(from_pbs(pbs_id)) == pbs_id


def test_an_element_belongs_to_an_array() -> None:
    assert (array_of(to_pbs("12_3")), array_of(to_pbs("12"))) == ("12[]", "12")
