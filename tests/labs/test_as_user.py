"""The tests of the lab can run as an ordinary user; if they cannot, the command fails instead of running them
as root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.labs import as_user
from tests.labs.operator import VARIABLE
from tests.labs.slurm import SlurmLab
from tests.wait import wait_for

AS_USER = (sys.executable, "-m", "tests.labs.as_user")


def test_without_a_lab_nothing_runs_and_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(as_user, "available", lambda: "no lab on this machine")
    assert as_user.main(["touch", str(tmp_path / "ran")]) != 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.slurm
def test_a_command_runs_as_an_ordinary_user_on_the_login_host(slurm_lab: SlurmLab) -> None:
    """This includes these tests themselves under `make test-slurm-as-user`."""
    done = _user_and_host(*([] if VARIABLE in os.environ else AS_USER))
    assert done.returncode == 0, done.stderr
    user, host = done.stdout.split()
    assert int(user) != 0
    assert host == "login1"


@pytest.mark.slurm
@pytest.mark.skipif(VARIABLE in os.environ, reason="only root makes network namespaces")
def test_a_login_host_in_use_stays_and_one_that_is_left_over_is_replaced(slurm_lab: SlurmLab) -> None:
    subprocess.run(["ip", "netns", "add", as_user.NAMESPACE], check=True)
    enter = ["nsenter", f"--net=/run/netns/{as_user.NAMESPACE}"]
    with subprocess.Popen([*enter, "cat"], stdin=subprocess.PIPE) as lives_there:
        wait_for(lambda: str(lives_there.pid) in _ip_netns_pids())
        assert _user_and_host(*AS_USER).returncode != 0
        assert lives_there.poll() is None
        assert str(lives_there.pid) in _ip_netns_pids()
    assert _user_and_host(*AS_USER).returncode == 0


def _ip_netns_pids() -> list[str]:
    return subprocess.run(["ip", "netns", "pids", as_user.NAMESPACE], capture_output=True, text=True).stdout.split()


def _user_and_host(*prefix: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", "import os, socket; print(os.geteuid(), socket.gethostname())"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
