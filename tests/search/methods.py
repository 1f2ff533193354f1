"""The source code of user-defined search methods."""

from __future__ import annotations

ROUNDS = '''
import math

from hpc_det.search.method import Work
from hpc_det.search.method import Trials


class Rounds:
    """All trials train for a round, the better half of them for another one, twice as long, and so on."""

    def __init__(self, max_trials, max_length, smaller_is_better, seed, rounds=3):
        self.trials_expected = max_trials
        self.sign = 1 if smaller_is_better else -1
        self.lengths = [max_length // 2**left for left in reversed(range(rounds))]
        self.trials = Trials(max_trials)
        self.values = {}
        self.round = 0

    def next_work(self):
        if work := self.trials.waiting_work():
            return work
        new = self.trials.new_trial()
        return Work(new, self.lengths[0]) if new else None

    def start(self, work):
        self.trials.start(work)

    def report(self, trial, value):
        del self.trials.working[trial]
        self.values[trial] = math.inf if math.isnan(value) else self.sign * value
        self._end_round()

    def end(self, trial, how):
        self.trials.close(trial)
        self._end_round()

    def _end_round(self):
        if not self.finished:
            return
        self.round += 1
        half = len(self.values) // 2 if self.round < len(self.lengths) else 0
        in_order = sorted(self.values, key=self.values.get)
        self.values = {}
        for trial in in_order[half:]:
            self.trials.close(trial)
        for trial in in_order[:half]:
            self.trials.queue(Work(trial, self.lengths[self.round]))

    def give_back(self, trial):
        self.trials.give_back(trial)

    def is_closed(self, trial):
        return trial in self.trials.closed

    @property
    def finished(self):
        return not self.trials.working and self.next_work() is None

    @property
    def progress(self):
        return len(self.trials.closed) / self.trials_expected
'''

POPULATION = '''
import math
import random

from hpc_det.search.method import FixedSearch


class Population(FixedSearch):
    """Generations of trials. Later trials continue from the weights of a good one, with a step from its lr."""

    def __init__(self, max_trials, max_length, smaller_is_better, seed, size=2):
        super().__init__(max_trials, max_length)
        self.size, self.seed = size, seed
        self.sign = 1 if smaller_is_better else -1
        self.values = {}
        self.ended = set()

    def next_work(self):
        work = super().next_work()
        before = range(1, (work.trial - 1) // self.size * self.size + 1) if work else ()
        return work if self.ended.issuperset(before) else None

    def report(self, trial, value):
        super().report(trial, value)
        self.values[trial] = math.inf if math.isnan(value) else self.sign * value
        self.ended.add(trial)

    def end(self, trial, how):
        super().end(trial, how)
        self.ended.add(trial)

    def source(self, trial):
        first = (trial - 1) // self.size * self.size + 1
        parents = [number for number in range(first - self.size, first) if number in self.values]
        return min(parents, key=self.values.get) if parents else None

    def sample(self, trial):
        draws, parent = random.Random(f"{self.seed}/{trial}"), self.source(trial)
        if parent is None:
            return {"lr": 10 ** draws.uniform(-4, -1)}
        return {"lr": self.sample(parent)["lr"] * draws.choice([0.8, 1.25])}
'''
