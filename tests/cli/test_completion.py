"""Completion of command lines in a shell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.cli.main import main
from tests.cli.conftest import Command
from tests.cli.life import Life

Offered = Callable[..., list[str]]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path) -> Offered:
    """Return a function from the words of a command line, of which the last may be empty, to their completions."""

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("_HPC_DET_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["hpc-det", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            main([])
        return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()]

    return ask


def test_commands_and_options(offered: Offered) -> None:
    assert offered("exp") == ["experiment"]
    assert "pause" in offered("experiment", "p")
    assert "--paused" in offered("experiment", "create", "--pau")


def test_the_ids_of_experiments_the_newest_first(offered: Offered, root: Path) -> None:
    for job in (11, 12):
        Life.submitted(root, job_id=str(job))
    assert offered("experiment", "describe", "") == ["2", "1"]
    assert offered("e", "kill", "1,") == ["1,2", "1,1"]


def test_the_trials_of_an_experiment(offered: Offered, life: Life) -> None:
    life.begins()
    assert offered("trial", "describe", "1") == ["1/"]
    assert offered("trial", "describe", "1/") == ["1/1"]


def test_names_of_templates_and_clusters(offered: Offered) -> None:
    assert offered("experiment", "create", "x.yaml", "--template", "sm") == ["small"]
    assert "local" in offered("experiment", "create", "x.yaml", "--cluster", "")


def test_a_damaged_experiment_completes_without_its_name(offered: Offered, life: Life) -> None:
    life.folder.effective.write_text("{")
    assert offered("e", "describe", "") == ["1"]


@pytest.mark.integration
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell(hpc_det: Command, shell: str) -> None:
    script = hpc_det("completion", shell).out
    assert "_HPC_DET_COMPLETE=" in script


@pytest.mark.integration
def test_bash_takes_the_script() -> None:
    script = subprocess.check_output([Path(sys.executable).with_name("hpc-det"), "completion", "bash"], text=True)
    asked = "complete -p hpc-det"
    done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
    assert "-F _hpc_det_completion hpc-det" in done.stdout
