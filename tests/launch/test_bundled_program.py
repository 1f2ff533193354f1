"""Ranks of each launcher import installed packages from the bundle of their plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_det.launch.launchers.arguments import for_python, with_bundle
from hpc_det.node.import_bundle import VARIABLE
from tests.installed_packages import Site
from tests.launch.gang import Gang
from tests.wait import DEADLINE_S

integration = pytest.mark.integration

SHOWS = """
import os, sys
import bundled_package
with open(f"rank-{os.environ['RANK']}", "w") as file:
    print(type(bundled_package.__loader__).__name__, file=file)
    print(sys.argv[1:], os.path.basename(sys.path[0]), __name__, file=file)
"""
FROM_BUNDLE, FROM_FILES = "BundledLoader", "SourceFileLoader"


@pytest.fixture(name="site")
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site.make(tmp_path, monkeypatch)
    site.write_bundle()
    return site


def run(gang: Gang, site: Site, launcher: str, *command: str, has_bundle: bool = True, **changes: Any) -> int:
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH")]))
    gang.plan(
        [sys.executable, "-m", f"hpc_det.launch.{launcher}", *command],
        environment=(f"PYTHONPATH={path}",),
        bundle=str(site.bundle) if has_bundle else "",
        **changes,
    )
    return gang.start_job().wait(timeout=DEADLINE_S)


def shown(gang: Gang) -> list[list[str]]:
    return [(gang.code / f"rank-{rank}").read_text().splitlines() for rank in range(2)]


@integration
@pytest.mark.parametrize(("text", "is_forked"), [(SHOWS, False), (f"import torch\n{SHOWS}", True)])
def test_executed_and_forked_scripts_of_the_direct_launcher_use_the_bundle(
    gang: Gang, site: Site, text: str, is_forked: bool
) -> None:
    (gang.code / "train.py").write_text(text)
    assert run(gang, site, "direct", "train.py", "--lr", "1", nursery=is_forked) == 0
    assert shown(gang) == [[FROM_BUNDLE, "['--lr', '1'] code __main__"]] * 2


@integration
def test_a_module_uses_the_bundle(gang: Gang, site: Site) -> None:
    (gang.code / "train.py").write_text(SHOWS)
    assert run(gang, site, "direct", "-m", "train", "x") == 0
    assert shown(gang) == [[FROM_BUNDLE, "['x'] code __main__"]] * 2


@integration
def test_ranks_of_torchrun_use_the_bundle(gang: Gang, site: Site) -> None:
    (gang.code / "train.py").write_text(SHOWS)
    assert run(gang, site, "torch_distributed", "train.py", "x") == 0, gang.printed.read_text()
    assert shown(gang) == [[FROM_BUNDLE, "['x'] code __main__"]] * 2


@integration
def test_an_executed_rank_of_a_trial_uses_the_bundle(gang: Gang, site: Site) -> None:
    (gang.code / "model_def.py").write_text(SHOWS)  # without a trial class, so the rank fails afterwards
    assert run(gang, site, "direct", "--trial", "model_def:Trial", nursery=False, ranks_per_node=1) != 0
    assert (gang.code / "rank-0").read_text().splitlines() == [FROM_BUNDLE, "['model_def:Trial'] code model_def"]


@integration
def test_without_a_bundle_packages_come_from_their_own_files(gang: Gang, site: Site) -> None:
    (gang.code / "train.py").write_text(SHOWS)
    assert run(gang, site, "direct", "train.py", has_bundle=False, nursery=False) == 0
    assert shown(gang)[0][0] == FROM_FILES


@integration
def test_ranks_run_without_a_bundle_that_does_not_match_and_say_so(gang: Gang, site: Site) -> None:
    site.record("bundled", ["bundled_single.py"])
    (gang.code / "train.py").write_text(SHOWS)
    assert run(gang, site, "direct", "train.py", nursery=False) == 0
    assert shown(gang)[0][0] == FROM_FILES
    assert "was changed or removed" in gang.trial.rank_log(1, 0).read_text()


@integration
@pytest.mark.parametrize(
    ("text", "code"), [("import sys; sys.exit(7)", 7), ("raise ValueError('mine')", 1), ("print('done')", 0)]
)
def test_a_program_exits_and_prints_as_without_a_bundle(tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "program.py").write_text(f"import atexit; atexit.register(print, 'at exit')\n{text}\n")
    ends = []
    for module in ([], ["-m", "hpc_det.launch.bundled_program"]):
        command = [sys.executable, *module, str(tmp_path / "program.py")]
        ended = subprocess.run(command, capture_output=True, text=True)
        ends.append((ended.returncode, ended.stdout, ended.stderr))
    assert ends[0] == ends[1]
    assert ends[0][0] == code


def test_only_python_programs_are_started_through_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_python(["train.py"]) == [sys.executable, "train.py"]
    monkeypatch.setenv(VARIABLE, "/bundle")
    assert with_bundle(["train.py", "1"]) == ["-m", "hpc_det.launch.bundled_program", "train.py", "1"]
    assert with_bundle(["-m", "train"]) == ["-m", "hpc_det.launch.bundled_program", "-m", "train"]
    assert with_bundle(["-m", "hpc_det.launch.rank", "model:Trial"]) == ["-m", "hpc_det.launch.rank", "model:Trial"]
    assert for_python(["./train"]) == ["./train"]
