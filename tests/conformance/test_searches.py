from __future__ import annotations

from collections import defaultdict, deque

import pytest

from hpc_det.search.by_name import search_method
from hpc_det.search.method import Exit, Work
from tests.conformance.searches import NUMBERS, SEARCHES, Number, Search


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.case)
def test_a_number_is_the_same(row: Number) -> None:
    assert row.found() == pytest.approx(row.expected) if _is_numeric(row.expected) else row.found() == row.expected


def _is_numeric(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int | float) for item in value)


@pytest.mark.parametrize("row", SEARCHES, ids=lambda row: row.case)
def test_a_search_trains_the_same_trials_to_the_same_lengths(row: Search) -> None:
    """Work is done one after the other in the order in which it is requested."""
    method = search_method({"max_concurrent_trials": 16, **row.searcher})
    lengths: dict[int, list[int | None]] = defaultdict(list)
    pending: deque[Work] = deque()
    while True:
        while work := method.next_work():
            method.start(work)
            pending.append(work)
        if not pending:
            break
        work = pending.popleft()
        lengths[work.trial].append(work.until)
        if row.stopped.get(work.trial) == work.until:
            method.end(work.trial, Exit.COMPLETED)
        else:
            method.report(work.trial, row.values[work.trial - 1])
    assert method.finished
    assert [lengths[trial] for trial in sorted(lengths)] == [list(expected) for expected in row.lengths]
