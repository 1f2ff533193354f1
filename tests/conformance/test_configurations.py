from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.request import Request
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective
from tests.config.conftest import CLUSTER, CONFIG, TRIAL
from tests.conformance.configurations import ROWS, Configuration

pytestmark = pytest.mark.integration
SITE = {**CLUSTER, "containers": {"runtime": "apptainer"}}
Build = Callable[[dict[str, Any]], Effective]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    (tmp_path / "model_def.py").write_text(TRIAL)
    (tmp_path / "train.py").touch()
    (tmp_path / "train.sh").touch()

    def run(keys: dict[str, Any]) -> Effective:
        config = {**CONFIG, **keys}
        return effective(Request(cluster=SITE, template=None, template_name=None, config=config, context_dir=tmp_path))

    return run


@pytest.mark.parametrize("row", [row for row in ROWS if not row.refused], ids=lambda row: row.case)
def test_a_configuration_is_accepted(row: Configuration, build: Build) -> None:
    tree = build(row.keys).tree
    for path, value in row.values.items():
        found: Any = tree
        for key in path.split("."):
            found = found[key]
        assert found == value, path


@pytest.mark.parametrize("row", [row for row in ROWS if row.refused], ids=lambda row: row.case)
def test_a_configuration_is_refused(row: Configuration, build: Build) -> None:
    with pytest.raises(UsageError) as error:
        build(row.keys)
    assert set(row.refused) <= {problem.partition(": ")[0] for problem in error.value.problems}
