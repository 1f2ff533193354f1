from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_det.config.secrets import MASK
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective
from hpc_det.submit.again import check_is_ones_own


def found(
    *, variables: list[str] | None = None, setup: tuple[str, ...] = (), data: Any = None, **searcher: Any
) -> Effective:
    environment = SimpleNamespace(variables=lambda slot_type: variables or [])
    return cast(
        Effective,
        SimpleNamespace(
            tree={"data": data or {}, "searcher": searcher},
            experiment=SimpleNamespace(environment=environment),
            cluster=SimpleNamespace(slot_type="cpu", setup=list(setup)),
        ),
    )


def problems(fork: Effective, **searcher: Any) -> list[str]:
    with pytest.raises(UsageError) as refused:
        check_is_ones_own(fork, {"searcher": searcher}, "ada")
    return refused.value.problems


def test_what_holds_no_secret_is_free() -> None:
    check_is_ones_own(found(variables=["A=1"], data={"url": "x"}), {"searcher": {}}, "ada")


def test_all_that_has_to_be_said_anew_is_told_at_once() -> None:
    fork = found(
        variables=["A=1", f"HF_TOKEN={MASK}"], setup=(MASK,), data={"secrets": {"user": MASK}}, source_trial_id="3/1"
    )
    assert problems(fork, source_trial_id="3/1") == [
        "data.secrets.user: a secret of ada's; give yours with --config data.secrets.user=VALUE",
        "environment.environment_variables: HF_TOKEN: secrets of ada's; give yours with --config "
        "'environment.environment_variables=[A=1, HF_TOKEN=VALUE]'",
        "cluster.setup: a line sets a secret of ada's; choose a profile that you may use with --cluster NAME",
        "searcher.source_trial_id: '3/1' is ada's; say one of yours, or null, with --config searcher.source_trial_id=",
    ]


def test_secrets_and_sources_of_ones_own_are_taken() -> None:
    fork = found(variables=[f"HF_TOKEN={MASK}", "HF_TOKEN=mine"], source_trial_id="5", source_checkpoint_uuid=None)
    check_is_ones_own(fork, {"searcher": {"source_trial_id": "3/1", "source_checkpoint_uuid": "u"}}, "ada")
