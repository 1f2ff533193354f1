from __future__ import annotations

import pytest

from hpc_det.config.managed_flags import (
    MANAGED,
    MANAGED_BY_QSUB,
    RefusedFlagsError,
    refuse_managed_flags,
    refuse_managed_qsub_flags,
)
from tests.facts import unnamed


@pytest.mark.parametrize("flag", MANAGED)
def test_every_managed_flag_names_its_setting(flag: str) -> None:
    with pytest.raises(RefusedFlagsError) as error:
        refuse_managed_flags([f"--{flag}=gpu:2"])
    ((what, remedy),) = error.value.refused
    assert not unnamed(what, f"--{flag}", f"'--{flag}=gpu:2'")
    assert remedy == MANAGED[flag]


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
        ["--gre", "gpu:4"],
        ["--gres=lustre,gpu:a100:4"],
        ["--gres=gres:gpu:1"],
        ["--no-requeue"],
        ["-G1 'unbalanced"],
        ["-J", "-name", "-n2"],
        ["-J-name -n2"],
        ["-W", "-J", "name"],
        ["--hold", "-N2"],
    ],
)
def test_a_managed_flag_is_refused_in_every_form(arguments: list[str]) -> None:
    with pytest.raises(RefusedFlagsError):
        refuse_managed_flags(arguments)


def test_other_flags_pass() -> None:
    refuse_managed_flags(["-J -name"])
    refuse_managed_flags(["-J", "-name", "-Jn2", "-HJ", "-n", "--job-name", "-N2", "--comment=-n"])
    refuse_managed_flags(
        ["-A", "acct", "--qos=high", "--mem=16G", "--gres=lustre:1", "--nodelist=n1", "--time-min=5", "-wn1", "-Cfast"]
    )


def test_every_refused_flag_is_told() -> None:
    with pytest.raises(RefusedFlagsError) as error:
        refuse_managed_flags(["-N2", "--time=10"])
    assert len(error.value.refused) == 2


@pytest.mark.parametrize("flag", MANAGED_BY_QSUB)
def test_every_managed_flag_of_qsub_names_its_setting(flag: str) -> None:
    argument = f"-{flag}=1" if " " in flag else f"-{flag}x"
    with pytest.raises(RefusedFlagsError) as error:
        refuse_managed_qsub_flags([argument])
    ((what, remedy),) = error.value.refused
    assert not unnamed(what, f"-{flag}")
    assert remedy == MANAGED_BY_QSUB[flag]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-l", "select=4:ncpus=2"],
        ["-l select=4"],
        ["-lselect=4"],
        ["-l place=free,walltime=10:00"],
        ["-W", "group_list=a,block=true"],
        ["-hN", "name"],
        ["-fV"],
        ["-m be -q low"],
        ["-h"],
        ["-c", "s"],
        ["-G"],
        ["-u user"],
        ["-X"],
        ["--version"],
        ["-P p --version"],
        ["-- /bin/true"],
    ],
)
def test_a_managed_flag_of_qsub_is_refused_in_every_form(arguments: list[str]) -> None:
    with pytest.raises(RefusedFlagsError):
        refuse_managed_qsub_flags(arguments)


def test_other_flags_of_qsub_pass() -> None:
    refuse_managed_qsub_flags(
        [
            "-P",
            "project",
            "-m be",
            "-M",
            "ada@site",
            "-W",
            "group_list=q",
            "-A",
            "account",
            "-A account",
            "-p",
            "-10",
            "-l",
            "place=scatter:excl",
        ]
    )


def test_a_word_that_no_directive_can_hold_is_refused() -> None:
    word = """it's "mine\""""
    with pytest.raises(RefusedFlagsError) as error:
        refuse_managed_qsub_flags(["-P", word])
    ((what, _),) = error.value.refused
    assert not unnamed(what, repr(word))
