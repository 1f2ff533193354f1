from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from hpc_det.sgd.rank.passes import Passes
from tests.facts import warned
from tests.sgd.rank.loaders import Noisy, Numbers, Seeds, Stream, flat, gang, handed_over, passes, taken


def torchs_own(size: int, length: int, batch_size: int, epochs: int, *, shuffle: bool) -> list[list[list[int]]]:
    """Return the batches that plain DDP loops read."""
    batches: list[list[list[int]]] = []
    for rank in range(size):
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(length), size, rank, shuffle=shuffle)
        loader = DataLoader(Numbers(length), batch_size=batch_size, sampler=sampler)
        batches.append([])
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            batches[-1] += [batch.tolist() for batch in loader]
    return batches


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "length"), [(2, 16), (3, 17), (1, 5), (4, 3), (5, 2)])
def test_ranks_read_what_they_read_with_torchs_distributed_sampler(size: int, length: int, shuffle: bool) -> None:
    ranks = gang(size, length, shuffle=shuffle)
    seen = [[*first, *second] for first, second in zip(taken(ranks), taken(ranks), strict=True)]
    assert seen == torchs_own(size, length, 2, 2, shuffle=shuffle)


def test_only_data_that_the_user_shuffles_is_shuffled() -> None:
    assert sorted(flat(taken(gang(2, 8)))) == [*range(8)]
    assert taken(gang(2, 8)) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert taken(gang(2, 8, shuffle=True)) != taken(gang(2, 8))


@given(
    length=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    per_rank=st.integers(1, 5),
    steps=st.integers(1, 3),
    exact=st.booleans(),
)
def test_a_pass_goes_on_at_the_right_sample_on_any_number_of_ranks(
    length: int, sizes: list[int], per_rank: int, steps: int, exact: bool
) -> None:
    """Every sample is read once, except for those that fill up the last batches."""
    seen: list[int] = []
    ranks = gang(sizes[0], length, batch_size=per_rank, exact=exact, shuffle=True)
    for size in sizes[1:]:
        seen += flat(taken(ranks, min(steps, left_of(ranks))))
        if not ranks[0].position()["is_open"]:
            break
        after = gang(size, length, batch_size=per_rank, exact=exact, shuffle=True)
        handed_over(ranks, after)
        ranks = after
    if ranks[0].position()["is_open"]:
        seen += flat(taken(ranks))
    assert {*seen} == {*range(length)}
    assert len(seen) < length + max(sizes)
    assert [rank.finished for rank in ranks] == [1] * len(ranks)


def left_of(ranks: list[Any]) -> int:
    """Return the number of batches that are left, also before the pass is open."""
    source = ranks[0]._source
    return int(source.left(ranks[0].position()["done"]))


@pytest.mark.parametrize(
    ("size", "length", "batch_size", "seen"),
    [
        (2, 7, 2, 7),
        (3, 10, 4, 10),
        (2, 5, 2, 6),  # 3 and 2 samples would make 2 batches and 1
        (2, 3, 1, 4),
        (3, 2, 4, 3),  # the third rank would have no sample
    ],
)
def test_validation_repeats_no_sample_where_ranks_get_equally_many_batches(
    size: int, length: int, batch_size: int, seen: int
) -> None:
    batches = taken(gang(size, length, batch_size=batch_size, exact=True))
    assert {*flat(batches)} == {*range(length)}
    assert len(flat(batches)) == seen
    assert len({len(rank) for rank in batches}) == 1


def test_drop_last_leaves_out_the_last_short_batch_of_each_rank() -> None:
    assert taken(gang(2, 10, batch_size=2, drop_last=True)) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_a_batch_sampler_of_torchs_own_is_shared_out() -> None:
    sampler = BatchSampler(RandomSampler(Numbers(8)), 2, drop_last=False)
    ranks = [passes(DataLoader(Numbers(8), batch_sampler=sampler), rank, 2, 2) for rank in range(2)]
    assert taken(ranks) == torchs_own(2, 8, 2, 1, shuffle=True)


def test_samples_that_come_alone_are_shared_out() -> None:
    ranks = [passes(DataLoader(Numbers(6), batch_size=None), rank, 2, 2) for rank in range(2)]
    assert [[*rank.batches(None)] for rank in ranks] == [[0, 2, 4], [1, 3, 5]]


def test_weights_are_kept_and_the_draws_are_shared_out() -> None:
    weights = [0.0, 1.0, 3.0, 0.0, 0.0, 0.0]
    loaders = [DataLoader(Numbers(6), sampler=WeightedRandomSampler(weights, 300)) for _ in range(2)]
    ranks = [passes(loader, rank, 2, 2) for rank, loader in enumerate(loaders)]
    seen = taken(ranks)
    assert [len(batches) for batches in seen] == [150, 150]
    assert {*flat(seen)} == {1, 2}
    assert 180 < flat(seen).count(2) < 270
    assert taken(ranks) != seen


class Backwards(Sampler[int]):
    def __iter__(self) -> Any:
        return iter([3, 2, 1, 0])

    def __len__(self) -> int:
        return 4


class BatchesOfItsOwn(BatchSampler):
    def __iter__(self) -> Any:
        return iter([[0], [1, 2, 3]])


class LoaderOfItsOwn(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([torch.tensor(0)])


@pytest.mark.parametrize(
    ("loader", "facts", "seen"),
    [
        (DataLoader(Numbers(4), sampler=Backwards()), ["sampler", "Backwards"], [[3], [2], [1], [0]]),
        (
            DataLoader(Numbers(4), batch_sampler=BatchesOfItsOwn([], 1, False)),
            ["sampler", "BatchesOfItsOwn"],
            [[0], [1, 2, 3]],
        ),
        (LoaderOfItsOwn(Numbers(4)), ["__iter__", "LoaderOfItsOwn"], [0]),
    ],
)
def test_what_may_share_out_by_itself_stays_and_is_named(loader: Any, facts: list[str], seen: Any) -> None:
    with warned(UserWarning, "train_loader", *facts):
        first = passes(loader, 0, 2, 2)
    assert taken([first, passes(loader, 1, 2, 2)]) == [seen, seen]


def test_a_distributed_sampler_stays_and_is_told_the_epoch() -> None:
    def loader(rank: int) -> DataLoader[Any]:
        return DataLoader(Numbers(9), batch_size=2, sampler=DistributedSampler(Numbers(9), 2, rank))

    ranks = [passes(loader(rank), rank, 2, 2) for rank in range(2)]
    seen = [[*first, *second] for first, second in zip(taken(ranks), taken(ranks), strict=True)]
    assert seen == torchs_own(2, 9, 2, 2, shuffle=True)


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (DataLoader(Numbers(4)), {"num_workers": 1}),
        (DataLoader(Numbers(4)), {"num_workers": 2, "share": False}),
        (DataLoader(Stream(4)), {"num_workers": 2}),
        ([torch.tensor([number]) for number in range(4)], {"num_workers": 2}),
    ],
)
def test_what_is_not_shared_out_is_read_whole_by_every_rank(loader: Any, options: Any) -> None:
    ranks = [passes(loader, rank, 2, **options) for rank in range(2)]
    assert taken(ranks) == [[[0], [1], [2], [3]]] * 2


def test_a_gang_that_has_shrunk_to_one_rank_still_reads_the_shared_order() -> None:
    loader = DataLoader(Numbers(6), batch_size=2, shuffle=True)
    assert taken([passes(loader, 0, 1, num_workers=2)]) == torchs_own(1, 6, 2, 1, shuffle=True)


def doubled(samples: list[Any]) -> Any:
    return [2 * sample for sample in samples], torch.utils.data.get_worker_info()


@pytest.mark.integration
def test_the_loader_keeps_what_it_was_made_with() -> None:
    given = DataLoader(
        Numbers(8),
        batch_size=2,
        num_workers=1,
        collate_fn=doubled,
        timeout=50,
        prefetch_factor=3,
        persistent_workers=True,
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    with closing(passes(given, 0, 2, 2)) as data:
        rebuilt = data._source._loader  # type: ignore[attr-defined]
        for name in ("num_workers", "collate_fn", "timeout", "prefetch_factor", "persistent_workers", "pin_memory"):
            assert getattr(rebuilt, name) == getattr(given, name), name
        assert [batch for batch, _ in data.batches(None)] == [[0, 4], [8, 12]]
        assert rebuilt.multiprocessing_context.get_start_method() == "fork"


def test_a_pass_takes_one_number_of_the_users_generator_as_torchs_loader_does() -> None:
    ours, torchs = (torch.Generator().manual_seed(1) for _ in range(2))
    [*passes(DataLoader(Numbers(4), generator=ours), 0, 2, 2).batches(None)]
    [*DataLoader(Numbers(4), generator=torchs)]
    assert torch.equal(ours.get_state(), torchs.get_state())


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_random_numbers_of_loader_processes_are_those_of_a_pass_that_was_not_left(persistent: bool) -> None:
    def noisy() -> Passes:
        loader = DataLoader(Noisy(12), batch_size=2, num_workers=2, persistent_workers=persistent)
        return passes(loader, 0, 1, 2)

    def taken_by(data: Passes, num_steps: int) -> list[Any]:
        return [[part.tolist() for part in batch] for batch in data.batches(num_steps)]

    with closing(noisy()) as whole, closing(noisy()) as left, closing(noisy()) as after:
        torch.manual_seed(5)
        expected = taken_by(whole, 9)
        torch.manual_seed(5)
        begin = taken_by(left, 2)
        handed_over([left], [after])
        assert begin + taken_by(after, 4) == expected[:6]
    assert len({str(batch[1:]) for batch in expected}) == 9


@pytest.mark.integration
def test_ranks_and_passes_have_random_numbers_of_their_own_whatever_the_seed() -> None:
    def drawn(rank: int) -> list[Any]:
        torch.manual_seed(5)
        with closing(passes(DataLoader(Seeds(2), num_workers=1), rank, 2, 2)) as data:
            return [[part.item() for part in batch] for batch in data.batches(2)]

    seeds, numbers = zip(*drawn(0), *drawn(1), strict=True)
    assert len({*seeds}) == len({*numbers}) == 4
    assert drawn(0)[0] == [seeds[0], numbers[0]]


def test_data_that_has_become_shorter_ends_the_pass() -> None:
    before, after = gang(2, 20), gang(2, 9)
    taken(before, 3)
    handed_over(before, after)
    assert [rank.finished for rank in after] == [1, 1]
    assert len(flat(taken(after))) == 10


def test_a_pass_of_one_worker_begins_once_more_for_several() -> None:
    before = passes(DataLoader(Numbers(8)))
    assert len([*before.batches(3)]) == 3
    after = gang(2, 8)
    handed_over([before], after)
    assert [(rank.begun, rank.finished) for rank in after] == [(0, 0)] * 2
    assert sorted(flat(taken(after))) == [*range(8)]
