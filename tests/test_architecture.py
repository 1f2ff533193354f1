"""The borders that keep the login side light and the imports one-way, and tests that each guard detects a violation."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_det

pytestmark = pytest.mark.integration

PACKAGE = Path(hpc_det.__file__).parent
ORDER = (
    "cli",
    "compat",
    "client",
    "report",
    "doctor",
    "sweep",
    "sgd",
    "submit",
    "launch",
    "notify",
    "view",
    "integrations",
    "pytorch",
    "core",
    "checkpoint",
    "distributed",
    "schedulers",
    "plan",
    "search",
    "config",
    "store",
    "node",
    "requeue",
    "errors",
    "resources",
)
"""A folder or module imports only entries below it, lazy imports included. hpc_det.__init__ describes each."""
HEAVY = ("torch", "numpy", "hydra", "deepspeed", "mpi4py")
LOGIN_SIDE = (
    "cli",
    "client",
    "doctor",
    "report",
    "submit",
    "view",
    "schedulers",
    "plan",
    "search",
    "config",
    "store",
    "node",
    "requeue",
    "errors",
    "resources",
)
NODE_SIDE = ("node", "launch", "notify")
THIRD_PARTY = ("torch", "numpy", "hydra", "omegaconf", "pydantic", "jinja2", "submitit", "click", "rich", "yaml")


def modules_of(*parts: str) -> list[str]:
    """Return every module below the named parts of the package."""
    found = []
    for part in parts:
        paths = (
            [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else sorted((PACKAGE / part).rglob("*.py"))
        )
        assert paths, part
        relative = (path.relative_to(PACKAGE.parent).with_suffix("") for path in paths)
        found += [".".join(path.parts).removesuffix(".__init__") for path in relative]
    return found


def loaded_by(modules: list[str], watched: tuple[str, ...]) -> set[str]:
    """Return those of the `watched` packages that a fresh interpreter has loaded after importing all `modules`."""
    code = f"import sys; [__import__(m) for m in {modules!r}]; print(*({set(watched)!r} & set(sys.modules)))"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_the_login_side_loads_neither_torch_nor_numpy() -> None:
    hydras = ("hpc_det.config.compose", "hpc_det.plan.axes")
    light = [module for module in modules_of(*LOGIN_SIDE) if module not in hydras]
    assert loaded_by(light, HEAVY) == set()


def test_the_node_side_is_standard_library_only() -> None:
    assert loaded_by(modules_of(*NODE_SIDE), THIRD_PARTY) == set()


def test_a_hydra_app_waits_for_no_library_that_it_does_not_use() -> None:
    """Its ranks load Hydra after they have connected to the agent, and never load torch."""
    assert loaded_by(["hpc_det.sweep.app"], (*THIRD_PARTY, "cloudpickle")) == set()
    assert loaded_by(modules_of("sweep"), ("torch", "numpy")) == set()


def test_a_hydra_app_that_uses_no_launcher_of_ours_loads_little_of_us() -> None:
    launchers = "hydra_plugins.hpc_launcher.launchers"
    assert loaded_by([launchers], ("pydantic", "submitit", "click", "jinja2", "cloudpickle")) == set()


def test_the_rank_side_loads_no_command_line_no_config_machinery_and_no_deepspeed() -> None:
    """The modules for DeepSpeed are an exception: DeepSpeed imports pydantic and, if it is installed, mlflow."""
    deepspeeds = modules_of("pytorch/deepspeed")
    rank_side = modules_of("checkpoint", "core", "distributed", "pytorch")
    config_machinery = ("hydra", "click", "rich", "submitit", "jinja2")
    assert loaded_by([*{*rank_side} - {*deepspeeds}], (*config_machinery, "pydantic", "deepspeed")) == set()
    # DeepSpeed itself imports transformers, and so click, if they are installed
    assert loaded_by(deepspeeds, config_machinery) <= loaded_by(["deepspeed"], config_machinery)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("hpc_det.config.compose", "hydra"),
        pytest.param("hpc_det.pytorch", "torch", marks=pytest.mark.long),
        pytest.param("hpc_det.pytorch.deepspeed", "deepspeed", marks=pytest.mark.long),
    ],
)
def test_the_guard_sees_what_is_loaded(module: str, package: str) -> None:
    assert loaded_by([module], HEAVY) >= {package}


@pytest.mark.parametrize("command", [["--help"], ["experiment", "list"], ["experiment", "--help"], ["sweep", "--help"]])
def test_everyday_commands_load_nothing_heavy(command: list[str]) -> None:
    code = f"import sys; from hpc_det.cli.main import main; main({command!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "hydra", "omegaconf", "pydantic", "submitit", "jinja2"} & set(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (["job", "list"], {"yaml", "hpc_det.config.plain_yaml"}),
        (["cluster", "list"], {"hpc_det.view.state", "hpc_det.search.state", "hpc_det.checkpoint.storage"}),
    ],
)
def test_a_small_command_loads_nothing_that_it_does_not_use(command: list[str], unused: set[str]) -> None:
    code = f"import sys; from hpc_det.cli.main import main; main({command!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not unused & set(done.stdout.split())


def test_the_map_names_every_folder_and_module_of_the_package_in_their_order() -> None:
    assert hpc_det.__doc__ is not None
    named = tuple(line.split()[0] for line in hpc_det.__doc__.splitlines() if line.startswith("    "))
    assert named == ORDER
    entries = (
        entry for entry in PACKAGE.iterdir() if entry.name not in ("__init__.py", "__main__.py", "__pycache__", "_data")
    )
    assert set(named) == {entry.stem for entry in entries if entry.is_dir() or entry.suffix == ".py"}


def private_imports_of_torch(code: str) -> set[str]:
    """Return the private modules and names of torch that `code` imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "torch" and "._" in name}


def test_no_module_needs_a_private_name_of_torch_to_be_imported() -> None:
    """There is no upper bound for torch, and another torch may lack the name."""
    assert private_imports_of_torch("from torch.nn.modules.loss import _Loss\nimport torch._dynamo, torch.nn") == {
        "torch.nn.modules.loss._Loss",
        "torch._dynamo",
    }
    found = {str(path): private_imports_of_torch(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def imports_of(code: str) -> set[str]:
    """Return the top-level folders and modules of the package that `code` imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("hpc_det.")} & set(ORDER)


def arrows_up(folder: str, code: str) -> set[str]:
    """Return the imports of `code` that come before `folder` in ORDER."""
    return {name for name in imports_of(code) if ORDER.index(name) < ORDER.index(folder)}


def test_every_import_points_down() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if folder in ORDER:
            wrong += [f"{path}: imports {name}" for name in arrows_up(folder, path.read_text(encoding="utf-8"))]
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "code", "found"),
    [
        ("store", "from hpc_det.plan.job_plan import JobPlan", {"plan"}),
        ("plan", "def f():\n    from hpc_det import submit, store", {"submit"}),
        ("node", "if TYPE_CHECKING:\n    import hpc_det.store.folders", {"store"}),
        ("launch", "from hpc_det.launch.agent import Agent\nfrom hpc_det.errors import HpcDetError", set()),
    ],
)
def test_the_guard_sees_an_import_that_points_up(folder: str, code: str, found: set[str]) -> None:
    assert arrows_up(folder, code) == found
