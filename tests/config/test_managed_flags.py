from __future__ import annotations

import pytest

from hpc_det.config.managed_flags import MANAGED, RefusedFlagsError, refuse_managed_flags


@pytest.mark.parametrize("flag", MANAGED)
def test_every_managed_flag_names_its_setting(flag: str) -> None:
    with pytest.raises(RefusedFlagsError) as error:
        refuse_managed_flags([f"--{flag}=gpu:2"])
    assert error.value.refused == [(f"hpc_det sets --{flag} itself, got '--{flag}=gpu:2'", MANAGED[flag])]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes=2"],
        ["--nodes", "2"],
        ["--nodes 2"],
        ["-N2"],
        ["-N", "2"],
        ["-HN2"],
        ["-A acct -n4"],
        ["--comment='a b' --time 10"],
        ["--parti=high"],
        ["-t10"],
        ["-phigh"],
        ["-o", "x.out"],
        ["--gres", "gpu:4"],
        ["--gres=lustre,gpu:a100:4"],
        ["--gres=gres:gpu:1"],
        ["--no-requeue"],
        ["-G1 'unbalanced"],
    ],
)
def test_a_managed_flag_is_refused_in_every_form(arguments: list[str]) -> None:
    with pytest.raises(RefusedFlagsError):
        refuse_managed_flags(arguments)


def test_other_flags_pass() -> None:
    refuse_managed_flags(
        ["-A", "acct", "--qos=high", "--mem=16G", "--gres=lustre:1", "--nodelist=n1", "--time-min=5", "-wn1", "-Cfast"]
    )


def test_every_refused_flag_is_told() -> None:
    with pytest.raises(RefusedFlagsError) as error:
        refuse_managed_flags(["-N2", "--time=10"])
    assert len(error.value.refused) == 2
