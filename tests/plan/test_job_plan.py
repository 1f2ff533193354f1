from __future__ import annotations

import json
import typing
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.node.format_version import KEY
from hpc_det.node.json_files import DamagedFile
from hpc_det.plan.job_plan import JobPlan
from tests.facts import refused
from tests.plan.plans import job_plan

WHOLE = st.integers(1 - 2**63, 2**63 - 1)  # larger numbers do not occur in files


def values(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    if kind is int:
        return WHOLE
    return st.none() | WHOLE if kind == int | None else st.from_type(kind)


any_plan = st.builds(JobPlan, **{name: values(kind) for name, kind in typing.get_type_hints(JobPlan).items()})


@pytest.mark.integration
@given(any_plan)
def test_a_plan_reads_back_from_json_as_it_was(plan: JobPlan) -> None:
    assert JobPlan.from_json(plan.to_json()) == plan


def test_a_plan_cannot_be_changed() -> None:
    plan = job_plan()
    with pytest.raises(FrozenInstanceError):
        plan.nodes = 3  # type: ignore[misc]
    assert isinstance(hash(plan), int)  # hashable, so its parts are immutable too


def test_every_setting_of_a_plan_is_written_out() -> None:
    assert json.loads(job_plan().to_json()).keys() == {KEY, *typing.get_type_hints(JobPlan)}


def test_a_plan_that_lacks_a_setting_is_refused() -> None:
    data = json.loads(job_plan().to_json())
    del data["nodes"]
    with refused(DamagedFile, "nodes"):
        JobPlan.from_json(json.dumps(data))


def test_the_world_is_all_ranks_of_all_nodes() -> None:
    assert job_plan(nodes=3, ranks_per_node=4).world_size == 12
