"""The stand-in PBS runs jobs as the recorded one did: their environment, their nodes, their output."""

from __future__ import annotations

from tests.lab.pbs_lab import PbsLab


def test_a_script_runs_below_a_login_shell_in_the_home_folder(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit("-j", "oe", "-o", "out", script="#!/bin/bash\npwd; umask; tr '\\0' ' ' </proc/$PPID/cmdline\n")
    assert pbs_lab.wait_for(job, "F")["Exit_status"] == 0
    assert (pbs_lab.home / "out").read_text().split() == [str(pbs_lab.home), "0077", "-bash"]
