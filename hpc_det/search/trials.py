"""The trials of a search: which exist, which are worked on, which have work that waits, which are closed."""

from __future__ import annotations

from bisect import bisect_left, insort

from hpc_det.search.method import Work


class Trials:
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """How many to create, with a replacement for each invalid one."""
        self.created = 0
        self.working: dict[int, Work] = {}
        self.closed: set[int] = set()
        self._waiting: dict[int, Work] = {}
        self._order: list[tuple[int, int]] = []
        """Of the works that wait: the longest first, then the oldest trial."""

    def waiting_work(self) -> Work | None:
        """Work that was decided on and that nobody does."""
        return self._waiting[self._order[0][1]] if self._order else None

    def new_trial(self) -> int | None:
        """The number of the trial to create next."""
        return self.created + 1 if self.created < self.wanted else None

    def start(self, work: Work) -> None:
        assert work.trial <= self.created + 1, work
        assert work.trial not in self.working, work
        assert work.trial not in self.closed, work
        self._unqueue(work.trial)
        self.created = max(self.created, work.trial)
        self.working[work.trial] = work

    def queue(self, work: Work) -> None:
        """Somebody should do this."""
        self._waiting[work.trial] = work
        insort(self._order, _place(work))

    def give_back(self, trial: int) -> None:
        self.queue(self.working.pop(trial))

    def close(self, trial: int) -> None:
        self.working.pop(trial, None)
        self._unqueue(trial)
        self.closed.add(trial)

    def reopen(self, work: Work) -> None:
        self.closed.remove(work.trial)
        self.queue(work)

    def replace(self, trial: int) -> None:
        """Close it and create another in its place."""
        self.close(trial)
        self.wanted += 1

    def is_under_way(self, trial: int) -> bool:
        """It has work, whether somebody does it or not."""
        return trial in self.working or trial in self._waiting

    def _unqueue(self, trial: int) -> None:
        if work := self._waiting.pop(trial, None):
            del self._order[bisect_left(self._order, _place(work))]


def _place(work: Work) -> tuple[int, int]:
    return -(work.until or 0), work.trial
