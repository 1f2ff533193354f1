from __future__ import annotations

import importlib.metadata
import sys

import pytest

from hpc_det.pytorch.deepspeed import check_installed
from tests.facts import refused, unnamed


def test_without_deepspeed_the_message_says_for_which_python_and_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError) as raised:
        check_installed()
    facts = ["hpc_det.pytorch.deepspeed", sys.executable, "pip install 'hpc_det[deepspeed]'"]
    assert unnamed(str(raised.value), *facts) == []
    assert raised.value.name == "deepspeed"


@pytest.mark.parametrize("found", ["0.18.9", "0.20.0", "1.0"])
def test_another_deepspeed_is_named_beside_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with refused(ImportError, "DeepSpeed >=0.19,<0.20", sys.executable, found, "pip install"):
        check_installed()


@pytest.mark.parametrize("found", ["0.19.0", "0.19.8+local"])
def test_any_of_the_range_will_do(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check_installed()
