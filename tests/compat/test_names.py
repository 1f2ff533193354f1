"""The names that `import determined` provides, and the errors for the names that it does not provide."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpc_det.config.determined_names import missing_part, names_of
from tests.compat.programs import Copies, printed
from tests.facts import unnamed

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    copies = Copies(tmp_path_factory.mktemp("python"))
    yield copies
    copies.close()


def test_every_name_of_determined_pytorch_is_hpc_dets_own(python: Copies) -> None:
    code = "import determined.pytorch as theirs, hpc_det.pytorch as ours\n"
    code += "print([name for name in ours.__all__ if getattr(theirs, name) is not getattr(ours, name)])"
    assert python.printed(code) == "[]"


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("import determined.pytorch.deepspeed as theirs", marks=pytest.mark.long),
        pytest.param("from determined.pytorch import deepspeed as theirs", marks=pytest.mark.long),
        "import determined as det, determined.pytorch.deepspeed; theirs = det.pytorch.deepspeed",
    ],
)
def test_every_name_of_determined_pytorch_deepspeed_is_hpc_dets_own(python: Copies, statement: str) -> None:
    code = f"{statement}\nimport hpc_det.pytorch.deepspeed as ours\n"
    code += "print([name for name in ours.__all__ if getattr(theirs, name) is not getattr(ours, name)])\n"
    code += "from determined.pytorch.deepspeed import DeepSpeedTrial, ModelParallelUnit, overwrite_deepspeed_config"
    assert python.printed(code) == "[]"


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import determined as det", "det.pytorch.PyTorchTrial"),
        ("import determined.pytorch", "determined.pytorch.PyTorchTrial"),
        ("from determined import pytorch", "pytorch.PyTorchTrial"),
        ("from determined.pytorch import PyTorchTrial as P", "P"),
        ("from determined.pytorch import *", "PyTorchTrial"),
        ("from determined.pytorch.trial.trial import PyTorchTrial as P", "P"),
        ("import determined.pytorch.trial.trial as t", "t.PyTorchTrial"),
        ("from determined.pytorch.trial import trial as t", "t.PyTorchTrial"),
    ],
)
def test_every_way_to_import_leads_to_the_same_class(python: Copies, statement: str, name: str) -> None:
    assert python.printed(f"import hpc_det.pytorch as ours\n{statement}\nprint({name} is ours.PyTorchTrial)") == "True"


def test_the_writer_of_older_trials_writes_outside_of_an_experiment_too(python: Copies) -> None:
    code = "from determined.tensorboard.metric_writers.pytorch import TorchWriter\n"
    code += "writer = TorchWriter()\nwriter.add_scalar('loss', 1.0, 1)\nwriter.flush()\n"
    code += "import os; print(len(os.listdir(writer.writer.log_dir)))"
    assert python.printed(code).splitlines()[-1] == "1"


def test_a_trial_of_determineds_is_a_trial_of_ours(python: Copies) -> None:
    code = "import determined as det\nfrom hpc_det.pytorch import PyTorchTrial\n"
    code += "class T(det.pytorch.PyTorchTrial): ...\nprint(issubclass(T, PyTorchTrial))"
    assert python.printed(code) == "True"


def test_no_module_is_executed_a_second_time_under_its_other_name(python: Copies) -> None:
    code = "import sys, determined.pytorch.trial.trial, determined.launch.torch_distributed\n"
    code += "print([n for n, m in sys.modules.items() if n.startswith('determined.') and 'annotations' in vars(m)])"
    assert python.printed(code) == "[]"


def test_the_samplers_are_a_module_below_pytorch(python: Copies) -> None:
    code = "import determined.pytorch.samplers\nfrom determined.pytorch import samplers\n"
    code += "import hpc_det.pytorch.samplers as ours\n"
    code += "both, name = (samplers, determined.pytorch.samplers), 'ReproducibleShuffleSampler'\n"
    code += "print([getattr(theirs, name) is getattr(ours, name) for theirs in both])"
    assert python.printed(code) == "[True, True]"


def test_batch_inference_is_in_pytorch_experimental(python: Copies) -> None:
    code = (
        "from determined.pytorch import experimental\nfrom determined.pytorch.experimental import TorchBatchProcessor\n"
    )
    code += "import hpc_det.pytorch as ours\n"
    code += "names = ('torch_batch_process', 'TorchBatchProcessor', 'TorchBatchProcessorContext')\n"
    code += "print([getattr(experimental, name) is getattr(ours, name) for name in names])"
    assert python.printed(code) == "[True, True, True]"


def test_the_functions_of_determined_util_that_examples_use_are_there(python: Copies) -> None:
    code = (
        "from determined import util\nbase, source = {'a': {'b': 1, 'c': 2}, 'd': 3}, {'a': {'b': 4}, 'e': {'f': 5}}\n"
    )
    code += "print(util.merge_dicts(base, source), base)\n"
    code += "class Blob:\n    calls = 0\n    def download_as_string(self):\n        self.calls += 1\n"
    code += "        return {2: b'content'}[self.calls]\n"
    code += "print(util.download_gcs_blob_with_backoff(Blob(), max_backoff=0))"
    merged = "{'a': {'b': 4, 'c': 2}, 'd': 3, 'e': {'f': 5}} {'a': {'b': 1, 'c': 2}, 'd': 3}"
    assert python.printed(code).splitlines() == [merged, "b'content'"]


def test_determineds_own_names_are_there_too(python: Copies) -> None:
    code = "import determined as det, logging, hpc_det.errors\n"
    code += "logging.basicConfig(format=det.LOG_FORMAT)\nprint(det.InvalidHP is hpc_det.errors.InvalidHP)"
    assert python.printed(code) == "True"


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        ("import determined.keras", "ModuleNotFoundError", "determined.keras"),
        ("from determined import keras", "ModuleNotFoundError", "determined.keras"),
        ("import determined as det; det.keras", "AttributeError", "determined.keras"),
        ("import determined.experimental.unmanaged", "ModuleNotFoundError", "determined.experimental.unmanaged"),
        (
            "from determined.experimental import client; client.create_model('m')",
            "AttributeError",
            "determined.experimental.client.create_model",
        ),
        ("import determined.launch.tensorflow", "ModuleNotFoundError", "determined.launch.tensorflow"),
        (
            "from determined.pytorch import LightningAdapter",
            "ModuleNotFoundError",
            "determined.pytorch.LightningAdapter",
        ),
        (
            "import determined as det; det.pytorch.reset_parameters",
            "AttributeError",
            "determined.pytorch.reset_parameters",
        ),
    ],
)
def test_what_hpc_det_does_not_have_is_named(python: Copies, code: str, kind: str, name: str) -> None:
    assert not unnamed(python.refusal(code), kind, name, "hpc_det", "docs/how-to/port-from-determined.md")


IMPORTS_MUCH = ("determined.pytorch.deepspeed", "determined.transformers", "determined.lightning.experimental")


@pytest.mark.parametrize(
    "module",
    [
        *("determined", "determined.pytorch", "determined.pytorch.samplers", "determined.pytorch.experimental"),
        *("determined.core", "determined.experimental", "determined.experimental.client"),
        *("determined.experimental.core_v2", "determined.launch.torch_distributed", "determined.util"),
        *(pytest.param(module, marks=pytest.mark.long) for module in IMPORTS_MUCH),
    ],
)
def test_the_names_that_config_check_knows_are_those_of_the_module(python: Copies, module: str) -> None:
    code = f"import importlib; module = importlib.import_module('{module}')\n"
    code += f"print(*(name for name in {{*dir(module), *{sorted(names_of(module))!r}}} if hasattr(module, name)))"
    there = python.printed(code).split()
    assert sorted(names_of(module) - {*there}) == []
    assert [name for name in there if missing_part(f"{module}.{name}")] == []
    assert missing_part(f"{module}.no_such_name.at_all") == f"{module}.no_such_name"


def test_a_probe_for_what_is_not_there_is_answered_as_python_answers_it(python: Copies) -> None:
    code = "import determined as det\ntry:\n    from determined import keras\nexcept ImportError:\n    keras = None\n"
    code += "print(keras, hasattr(det, 'keras'), hasattr(det.pytorch, 'keras'))"
    assert python.printed(code) == "None False False"


def test_a_names_list_shows_what_there_is(python: Copies) -> None:
    assert "PyTorchTrial" in python.printed("import determined.pytorch; print(dir(determined.pytorch))")


def test_the_client_is_hpc_dets(python: Copies) -> None:
    code = "from determined.experimental import client, Determined\nimport hpc_det.compat.experimental_client as ours\n"
    code += "print([name for name in ours.__all__ if getattr(client, name) is not getattr(ours, name)], "
    code += "Determined is ours.Determined)"
    assert python.printed(code) == "[] True"


HEAVY = "{'torch', 'numpy', 'pydantic', 'yaml', 'deepspeed'} & set(sys.modules)"


def test_nothing_heavy_is_loaded_before_somebody_asks_for_it() -> None:
    switched_on = "import sys, hpc_det.compat; hpc_det.compat.install()"
    assert printed(f"{switched_on}; import determined; print({HEAVY})", before=()) == "set()"
    assert printed(f"{switched_on}; import determined.launch.torch_distributed; print({HEAVY})", before=()) == "set()"
    assert "torch" in printed(f"{switched_on}; import determined.pytorch; print({HEAVY})", before=())


def test_deepspeed_is_loaded_with_the_module_that_needs_it(python: Copies) -> None:
    loaded = "import sys; print('deepspeed' in sys.modules)"
    assert python.printed(f"import determined.pytorch; {loaded}") == "False"
    assert python.printed(f"import determined.pytorch.deepspeed; {loaded}") == "True"
