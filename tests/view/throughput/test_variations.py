from __future__ import annotations

from typing import Any

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.errors import UsageError
from hpc_det.view.throughput.measurement import Aim
from hpc_det.view.throughput.variations import MOST_DOUBLINGS, larger_batch, slot_counts, variations
from tests.view.throughput.measurements import BASELINE, OUT_OF_MEMORY, batches_of, failed, measured

CLUSTER = Cluster(name="test", scheduler="slurm", slots_per_node=2, max_nodes=4, slot_type="gpu")


def experiment(slots: int = 4, aggregation_frequency: int = 1, **hyperparameters: Any) -> dict[str, Any]:
    return {
        "resources": {"slots_per_trial": slots},
        "optimizations": {"aggregation_frequency": aggregation_frequency},
        "hyperparameters": {"global_batch_size": 64, **hyperparameters},
    }


def test_an_experiment_is_compared_with_itself_without_loading_without_exchange_and_on_fewer_slots() -> None:
    found = variations(experiment(), CLUSTER)
    assert found.baseline == BASELINE
    assert [(one.aim, one.slots, one.batch_size) for one in found.others] == [
        (Aim.INPUT, 4, 64),
        (Aim.COMMUNICATION, 4, 64),
        (Aim.SLOTS, 1, 16),
        (Aim.SLOTS, 2, 32),
    ]
    assert [one.trains_on for one in found.others[:2]] == ["first batch", "data"]
    assert [one.aggregation_frequency for one in found.others[:2]] == [1, 1000]
    assert found.grows_batches
    assert found.left_out == ()


def test_a_batch_that_slots_do_not_share_evenly_is_one_that_they_do_on_others() -> None:
    sizes = {one.slots: one.batch_size for one in variations(experiment(global_batch_size=67), CLUSTER, 8).others}
    assert sizes == {4: 67, 1: 16, 2: 32, 8: 128}


def test_one_slot_exchanges_nothing_and_is_not_scaled() -> None:
    found = variations(experiment(slots=1), CLUSTER)
    assert [one.aim for one in found.others] == [Aim.INPUT]
    assert [reason.partition(":")[0] for reason in found.left_out] == ["communication", "scaling"]


def test_without_a_batch_size_only_the_trial_knows_it() -> None:
    found = variations(experiment(global_batch_size=None), CLUSTER)
    assert not found.grows_batches
    assert {one.batch_size for one in found.others} == {None}
    assert "hyperparameters.global_batch_size is not set" in found.left_out[0]


def test_constants_may_be_written_in_full() -> None:
    assert variations(experiment(global_batch_size={"type": "const", "val": 32}), CLUSTER).baseline.batch_size == 32


@pytest.mark.parametrize(("most", "named"), [(3, "use 2 or 4"), (16, "use at most 8")])
def test_slots_that_no_trial_can_have_are_refused(most: int, named: str) -> None:
    with pytest.raises(UsageError, match=f"--max-slots: {most} .*{named}"):
        variations(experiment(), CLUSTER, most)


@pytest.mark.parametrize(
    ("most", "per_node", "counts"),
    [
        (1, 8, [1]),
        (3, 8, [1, 2, 3]),
        (8, 8, [1, 2, 4, 8]),
        (6, 6, [1, 2, 4, 6]),
        (24, 6, [1, 2, 4, 6, 12, 24]),
        (12, 4, [1, 2, 4, 8, 12]),
        (4, 1, [1, 2, 4]),
    ],
)
def test_slots_are_doubled_within_a_node_and_then_nodes_are(most: int, per_node: int, counts: list[int]) -> None:
    assert slot_counts(most, per_node) == counts


def test_batches_grow_until_memory_is_full() -> None:
    found = [measured(BASELINE, 100)]
    assert larger_batch(found, is_memory_bound=True) == batches_of(128)
    found.append(measured(batches_of(128), 100))
    assert larger_batch(found, is_memory_bound=True) == batches_of(256)
    found.append(failed(batches_of(256), OUT_OF_MEMORY))
    assert larger_batch(found, is_memory_bound=True) is None


def test_where_memory_is_no_limit_batches_grow_as_long_as_it_pays() -> None:
    found = [measured(BASELINE, 100), measured(batches_of(128), 106)]
    assert larger_batch(found, is_memory_bound=False) == batches_of(256)
    found.append(measured(batches_of(256), 110))
    assert larger_batch(found, is_memory_bound=False) is None


def test_batches_do_not_grow_for_ever() -> None:
    found = [measured(BASELINE, 100)]
    while one := larger_batch(found, is_memory_bound=True):
        found.append(measured(one, 100))
    assert len(found) == 1 + MOST_DOUBLINGS
