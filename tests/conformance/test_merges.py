from __future__ import annotations

import pytest

from hpc_det.config.merge import merge
from tests.conformance.merges import ROWS, Merge


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_a_template_and_a_configuration_are_merged(row: Merge) -> None:
    assert merge(row.template, row.config) == row.merged
