from __future__ import annotations

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.errors import UsageError
from hpc_det.plan.gang import Gang, gang


def cluster(max_nodes: int | None = None) -> Cluster:
    return Cluster(name="atlas", scheduler="slurm", slots_per_node=4, slot_type="gpu", max_nodes=max_nodes)


@pytest.mark.parametrize(
    ("slots", "nodes", "ranks_per_node"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4), (8, 2, 4), (12, 3, 4), (4000, 1000, 4)],
)
def test_any_number_fits_a_node_and_whole_nodes_fit_beyond(slots: int, nodes: int, ranks_per_node: int) -> None:
    assert gang(slots, cluster()) == Gang(nodes=nodes, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(("slots", "low", "high"), [(5, 4, 8), (7, 4, 8), (9, 8, 12), (4001, 4000, 4004)])
def test_part_of_a_node_is_an_error_that_names_what_would_fit(slots: int, low: int, high: int) -> None:
    with pytest.raises(UsageError) as error:
        gang(slots, cluster())
    assert str(error.value) == (
        f"resources.slots_per_trial: {slots} does not fill whole nodes of 4 slots on cluster 'atlas'; "
        f"use {low} or {high}"
    )


@pytest.mark.parametrize("slots", [9, 10, 12])
def test_more_than_the_cluster_has_is_an_error_that_names_the_most(slots: int) -> None:
    with pytest.raises(UsageError) as error:
        gang(slots, cluster(max_nodes=2))
    assert str(error.value) == (
        f"resources.slots_per_trial: {slots} is more than cluster 'atlas' has, 2 node(s) of 4 slots; use at most 8"
    )


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_all_of_the_cluster_may_be_asked_for(slots: int) -> None:
    shape = gang(slots, cluster(max_nodes=2))
    assert shape.nodes * shape.ranks_per_node == slots


def test_no_advice_exceeds_the_cluster() -> None:
    with pytest.raises(UsageError, match=r"use 4 or 8$"):
        gang(7, cluster(max_nodes=2))
    with pytest.raises(UsageError, match=r"use at most 4$"):
        gang(5, cluster(max_nodes=1))
