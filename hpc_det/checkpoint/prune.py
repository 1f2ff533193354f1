"""Which checkpoints may go: a pure rule.

Kept are the best N of the trial (by the validation at the same number of batches) and the latest N; while the trial
runs, always the two newest, so that a damaged one has something to fall back to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hpc_det.checkpoint.committed import Committed

RESUME_DEPTH = 2


def superfluous(
    checkpoints: Sequence[Committed],
    validations: Mapping[int, float],
    *,
    smaller_is_better: bool,
    best: int,
    latest: int,
) -> list[Committed]:
    """Those of `checkpoints` (newest first) that nothing keeps.

    `validations`: batches -> searcher metric; NaN is worst.
    """

    def badness(checkpoint: Committed) -> tuple[bool, float, int]:
        """Of equals the earliest is the best: it is the one that was strictly better when it came."""
        value = validations[checkpoint.steps]
        if math.isnan(value):
            return True, 0.0, checkpoint.steps
        return False, value if smaller_is_better else -value, checkpoint.steps

    validated = sorted((item for item in checkpoints if item.steps in validations), key=badness)
    kept = {item.uuid for item in [*validated[:best], *checkpoints[:latest]]}
    return [item for item in checkpoints if item.uuid not in kept]
