from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_det.config.determineds_keys import REMEDIES
from hpc_det.config.effective import Effective
from hpc_det.config.fields import keys_at
from hpc_det.config.schema import Experiment
from hpc_det.errors import UsageError


@pytest.mark.parametrize("path", REMEDIES)
def test_a_key_that_only_determined_has_is_told_with_what_to_do(build: Callable[..., Effective], path: str) -> None:
    *sections, key = path.split(".")
    written: dict[str, Any] = {key: 1}
    for section in reversed(sections):
        written = {section: written}
    with pytest.raises(UsageError) as refused:
        build(**written)
    assert f"{path}: a key of Determined's that hpc_det does not have (from config); {REMEDIES[path]}" in (
        refused.value.problems
    )


def test_no_key_of_ours_stands_among_them() -> None:
    for path in REMEDIES:
        *sections, key = path.split(".")
        assert key not in (keys_at(Experiment, tuple(sections)) or [])
