"""Whatever value a leaf of a schema has, it is refused by name, or arrives as data: no shell, scheduler or template
interprets it.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.request import Request
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.planner import placement, plan_jobs
from hpc_det.schedulers.pbs import scheduler as pbs_flags
from hpc_det.schedulers.slurm import scheduler as slurm_flags
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.render import agent_command, render
from tests.chaos.schema_leaves import CLUSTER, EXPERIMENT, Leaf, leaves
from tests.chaos.table import Amount, Tally
from tests.stub import Stub
from tests.stub import stub as stub
from tests.submit.hostile import VALUES, arguments, telltale_python

TEXTS = [
    *VALUES,
    *("a\ntouch X", "a\n#SBATCH --wrap=touch", "#PBS -N x", "a\r#SBATCH --wait", "a\x00b", "a\x1b[31mred", "\u202exet"),
    *(
        "\ud800",
        "\u2028touch X",
        "x" * 20_000,
        "${PWD}",
        "$(touch X)'\"`touch X`",
        "''",
        '"',
        "'\"",
        "-",
        "--",
        "~",
        "!1",
    ),
    *(
        "a=b",
        "a,b",
        "a:b",
        "a%j%A%t",
        "\\",
        "\\\n",
        "!!python/object/apply:os.system ['touch X']",
        "*alias",
        "&a",
        "{}",
    ),
    *(
        "=",
        "[]",
        "null",
        "../../X",
        "$((1+1))",
        ">X",
        "|touch X",
        "a'b\"c\\d$e`f",
        "\ttouch X",
        "é\u0301",
        "\N{ZERO WIDTH SPACE}",
    ),
]
KINDS: list[Any] = [
    *(True, 0, -1, 2**31, 10**400, 1.5, 1e308, float("nan"), float("inf"), b"bytes", {1, 2}, object()),
    *([[[[]]]], [{}], {"a": {"b": [None]}}, {1: 2}, [None], {"": ""}, {"$(touch X)": "`touch X`"}, [1], {"a": 1}),
]
FORMS: list[Callable[[str], Any]] = [
    lambda text: text,
    lambda text: [text],
    lambda text: {"k": text},
    lambda text: f"/{text}",
    lambda text: f"A={text}",
    lambda text: [f"A={text}"],
    lambda text: f"--comment={text}",
    lambda text: [f"--comment={text}"],
    lambda text: {"cuda": text},
]
"""A leaf that accepts text accepts one of these forms."""
SCHEDULERS = ("slurm", "pbs", "local")
ARRAY = JobArray(first=0, count=1)
LEAVES = leaves()
GROUP_COUNT = 8
GROUPS = [(schema, group) for schema in ("experiment", "cluster") for group in range(GROUP_COUNT)]


def test_every_leaf_has_a_base_that_is_valid(tmp_path: Path) -> None:
    for leaf in {str(leaf): leaf for leaf in LEAVES}.values():
        assert compiled(leaf, leaf.base, "slurm", tmp_path), leaf
    assert len(LEAVES) > 200


@pytest.mark.integration
@pytest.mark.parametrize("chosen", SCHEDULERS)
@pytest.mark.parametrize(("schema", "group"), GROUPS)
def test_a_hostile_value_is_refused_by_name_or_is_data(
    schema: str, group: int, chosen: str, amount: Amount, tally: Tally, tmp_path: Path, stub: Stub
) -> None:
    """Try each value in each leaf, on each scheduler; the leaves are in groups, so that no test takes long."""
    stub("module", f"printf '%s\\0' \"$@\" >>{shlex.quote(str(tmp_path / 'modules'))}")
    site = Site(tmp_path)
    found = amount.of([leaf for leaf in LEAVES if leaf.schema == schema][group::GROUP_COUNT], sample=1)
    trials = [(leaf, value) for leaf in found for value in hostile_values(leaf, tmp_path)]
    for leaf, value in amount.of(trials, sample=10):
        with tally.trying(f"hostile value, {schema}"):
            check(leaf, value, chosen, site)


def hostile_values(leaf: Leaf, folder: Path) -> Iterator[Any]:
    """Yield the values in the forms that the leaf accepts, and bare."""
    bare, *others = FORMS
    taken = [bare, *(form for form in others if is_taken(leaf, form("benign"), folder))]
    yield from KINDS
    for text in TEXTS:
        yield from (form(text) for form in taken)


def is_taken(leaf: Leaf, value: Any, folder: Path) -> bool:
    try:
        compiled(leaf, leaf.given(value), "slurm", folder)
    except UsageError:
        return False
    return True


class Site:
    """Runs jobs with a Python that records its arguments."""

    def __init__(self, folder: Path) -> None:
        self.python, self.recorded = telltale_python(folder / "site")
        self.modules = folder / "modules"
        self.nowhere = folder / "nowhere"
        self.nowhere.mkdir()
        self.home = folder / "root"
        self._seen: set[str] = set()

    @property
    def experiment(self) -> ExperimentFolder:
        found = ExperimentFolder(self.home / "experiments" / "12")
        found.jobs.mkdir(parents=True, exist_ok=True)
        return found

    def runs_as_data(self, script: str, plan: JobPlan, leaf: Leaf) -> None:
        """Check that the script, run by bash, does only what it does for every experiment."""
        if script in self._seen:
            return
        self._seen.add(script)
        self.modules.unlink(missing_ok=True)
        path = self.experiment.script()
        path.write_text(script)
        subprocess.run(["bash", "-n", path], check=True)
        done = subprocess.run(["bash", path], cwd=self.nowhere, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), (leaf, done)
        assert [*self.nowhere.iterdir(), *self.home.rglob("X"), *self.home.rglob("*touch*")] == [], leaf
        assert arguments(self.recorded)[-len(started(plan)) :] == started(plan), leaf
        loaded = self.modules.read_text().split("\0")[1::2] if self.modules.exists() else []
        assert loaded == list(plan.modules), leaf


def started(plan: JobPlan) -> list[str]:
    """Return the command that starts the agents, with the agents' command."""
    agent = shlex.split(agent_command(plan))
    return [*slurm_flags.srun_command(plan, ARRAY), *agent] if plan.scheduler == "slurm" else agent


def check(leaf: Leaf, value: Any, chosen: str, site: Site) -> None:
    refusal = None
    try:
        found = compiled(leaf, leaf.given(value), chosen, site.nowhere.parent)
        plan, script = planned(found, site)
    except UsageError as error:
        refusal = str(error)
    if refusal is not None:
        assert leaf.key in refusal or str(leaf.path[0]) in refusal, (leaf, value, refusal)
        return
    arrived(leaf, value, found)
    read_as_written(script, plan, site.experiment.script())
    if leaf.key != "setup":  # the only leaf that is shell code
        site.runs_as_data(script, plan, leaf)


def compiled(leaf: Leaf, tree: Any, chosen: str, folder: Path) -> Effective:
    """Return the effective configuration, as the product computes it: merged, validated, cross-checked."""
    code = folder / "code"
    if not code.exists():
        code.mkdir()
        (code / "train.py").write_text("import hpc_det\n")
    cluster, config = (CLUSTER, tree) if leaf.schema == "experiment" else (tree, EXPERIMENT)
    if leaf.schema == "experiment" and leaf.path[0] in ("environment", "bind_mounts"):
        cluster = {**cluster, "containers": {"runtime": "apptainer"}}
    if leaf.path[0] == "bind_mounts":
        config = {**config, "environment": {"image": "/ours.sif"}}
    return effective(
        Request(
            cluster={"scheduler": chosen, **cluster},
            template=None,
            template_name=None,
            config=config,
            context_dir=code,
        )
    )


def planned(found: Effective, site: Site) -> tuple[JobPlan, str]:
    folder = site.experiment
    place = placement(found.experiment, found.cluster, 1, 0)
    plan = plan_jobs(found.experiment, found.cluster, folder, place, python=str(site.python))
    read_back = JobPlan.from_json(plan.to_json())
    assert read_back == plan
    return plan, render(plan, ARRAY, folder.script())


def arrived(leaf: Leaf, value: Any, found: Effective) -> None:
    """Check that each text of the value is in the effective configuration, or in the profile, unchanged."""
    tree = found.tree if leaf.schema == "experiment" else found.cluster.model_dump(mode="json")
    have = list(texts(tree))
    missing = [text for text in texts(value) if text not in have]
    assert not missing, (leaf, value, missing)


def texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts(key)
            yield from texts(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from texts(value)


DIRECTIVE = {"slurm": "#SBATCH", "pbs": "#PBS"}


def read_as_written(script: str, plan: JobPlan, path: Path) -> None:
    """Check that the scheduler reads the decided flags, each once, and no others."""
    if plan.scheduler == "local":
        return
    read = [words(rest, plan.scheduler) for rest in directives(script, plan.scheduler)]
    own = [word for entry in plan.submit_args for word in (entry.split(None, 1) if two_words(entry) else [entry])]
    if plan.scheduler == "slurm":
        decided = [[flag] for flag in slurm_flags.directives(plan, ARRAY, path)]
    else:
        decided = [flag.split(" ", 1) for flag in pbs_flags.directives(plan, path)]
        decided = [[name, *words(value, "pbs")] for name, value in decided]
        assert ["-A", plan.account] in decided or plan.account is None
        assert ["-q", plan.partition] in decided or plan.partition is None
        assert len(decided) == len({tuple(flag[:1]) for flag in decided}) + sum(flag[0] == "-l" for flag in decided) - 1
    assert read == [*decided, *([own] if own else [])]


def two_words(entry: str) -> bool:
    return re.match(r"(-\w|--[\w-]+)\s+\S", entry) is not None


def directives(script: str, name: str) -> Iterator[str]:
    """Yield the directives before the first command: sbatch and qsub read no further."""
    for line in itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.split("\n")):
        if line.startswith(DIRECTIVE[name]):
            yield line.removeprefix(DIRECTIVE[name]).strip()


def words(text: str, name: str) -> list[str]:
    """Split as sbatch does, with escapes in either kind of quotes, or as qsub does, without escapes."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    lexer.escape, lexer.escapedquotes = ("\\", "\"'") if name == "slurm" else ("", "")
    return list(lexer)
