from __future__ import annotations

import re
from pathlib import Path

from hpc_det.config.environment_variables import GROUPS, OWN_PREFIX, without_effect
from hpc_det.store.attempt import Attempt
from tests.facts import unnamed

PACKAGE = Path(__file__).parents[2] / "hpc_det"
KNOWN = {name for group in GROUPS.values() for name in group if name.startswith(OWN_PREFIX)}


def test_every_variable_of_the_package_is_described_and_no_other() -> None:
    described = PACKAGE / "config" / "environment_variables.py"
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path != described]
    named = {name for text in texts for name in re.findall(r"\bHPC_DET_[A-Z_]*[A-Z]\b", text)}
    of_an_attempt = {f"{OWN_PREFIX}{name.upper()}" for name in Attempt.__dataclass_fields__}
    assert named | of_an_attempt == KNOWN


def test_a_misspelt_variable_is_noted_with_the_one_that_was_meant() -> None:
    (note,) = without_effect(["HPC_DET_ROTO", "HPC_DET_SECRET", "HPC_DET_MY_OWN", "PATH"])
    assert not unnamed(note, "HPC_DET_ROTO", "HPC_DET_ROOT")
