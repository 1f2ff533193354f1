"""The examples to start from: each has a page, and configurations for this machine, one GPU and two nodes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hpc_det.cli.main import main
from hpc_det.config.plain_yaml import load_yaml
from tests.cli.conftest import umask as umask
from tests.docs.page import Command, Page

CHECKOUT = Path(__file__).parents[2]
EXAMPLES = CHECKOUT / "docs" / "examples"
GALLERY = sorted(path.parent for path in EXAMPLES.glob("*/two_nodes.yaml"))
NODES = {"one_gpu": 1, "two_nodes": 2}
"""Nodes with eight GPUs of the jobs, by the name of the configuration."""
REQUESTS = {
    "slurm": r"#SBATCH --nodes=(\d+)\n",
    "pbs": r"#PBS -l select=(\d+):",
}
"""Pattern of the number of nodes in a job script, by the example profile."""
OVERRIDES = {"overwrite_deepspeed_args"}
"""Hyperparameters that a configuration may lack."""

every_example = pytest.mark.parametrize("example", GALLERY, ids=lambda path: path.name)


def config(example: Path, name: str) -> dict[str, Any]:
    return load_yaml(example / f"{name}.yaml")


@every_example
def test_an_example_has_a_page_that_the_index_links_to(example: Path) -> None:
    assert (example / "README.md").is_file()
    assert f"]({example.name}/README.md)" in (EXAMPLES / "README.md").read_text()


@every_example
def test_its_three_configurations_train_the_same_code(example: Path) -> None:
    tiny = config(example, "tiny")
    for name, slots in {"one_gpu": 1, "two_nodes": 16}.items():
        other = config(example, name)
        assert other["resources"]["slots_per_trial"] == slots
        assert other["entrypoint"] == tiny["entrypoint"]
        assert {*other["hyperparameters"], *OVERRIDES} == {*tiny["hyperparameters"], *OVERRIDES}
        assert other.get("data", {}).keys() == tiny.get("data", {}).keys()
        assert other["searcher"]["metric"] == tiny["searcher"]["metric"]


@pytest.mark.parametrize("scheduler", REQUESTS)
@every_example
def test_the_commands_of_its_page_become_jobs_on_one_and_two_nodes(
    example: Path,
    scheduler: str,
    state_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(CHECKOUT)
    profile = state_folder / "conf" / "cluster" / "eight.yaml"
    profile.parent.mkdir(parents=True)
    of_two = (CHECKOUT / "conf" / "cluster" / f"{scheduler}.yaml").read_text()
    profile.write_text(of_two.replace("slots_per_node: 2 ", "slots_per_node: 8 "))
    steps = Page.read(example / "README.md").steps()
    lines = [step.line for step in steps if isinstance(step, Command) and "submit" in step.marks]
    nodes = {}
    for line in lines:
        words = shlex.split(line.replace("\\\n", " ").replace("--cluster NAME", "--cluster eight --dry-run"))
        assert main(words[1:]) == 0, line
        nodes[Path(words[3]).stem] = int(re.findall(REQUESTS[scheduler], capsys.readouterr().out)[0])
    assert nodes == NODES
