"""The results of all ranks as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from hpc_det.sgd.operator.constants import NUM_SAMPLES


def reduce(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's keys: `num_samples` summed, other numbers averaged, anything else rank 0's.

    The mean over ranks is unweighted, and leaves out NaN and ranks without that key: the mean of the ranks' means, not
    of all samples. It is a numpy.float64.
    """
    return {name: _reduced(name, value, results) for name, value in results[0].items()}


def _reduced(name: str, first: Any, results: Sequence[Mapping[str, Any]]) -> Any:
    if not isinstance(first, Real):
        return first
    numbers = [value for result in results if isinstance(value := result.get(name), Real)]
    return sum(numbers) if name == NUM_SAMPLES else _mean(numbers)


def _mean(numbers: Sequence[Any]) -> np.float64:
    known = [float(number) for number in numbers if not math.isnan(number)]
    return np.float64(math.fsum(known) / len(known) if known else math.nan)
