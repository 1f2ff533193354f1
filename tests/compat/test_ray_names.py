"""The names that `import ray` provides to programs for RaySGD, and the errors for all other names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.programs import Copies, printed, python
from tests.facts import unnamed

pytestmark = pytest.mark.integration

PAGE = "docs/how-to/port-from-raysgd.md"


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    copies = Copies(tmp_path_factory.mktemp("python"))
    yield copies
    copies.close()


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from ray.util.sgd import TorchTrainer as t", "t"),
        ("from ray.util.sgd.torch import TorchTrainer as t", "t"),
        ("from ray.util.sgd.torch.torch_trainer import TorchTrainer as t", "t"),
        ("import ray.util.sgd", "ray.util.sgd.TorchTrainer"),
        ("import ray", "ray.util.sgd.TorchTrainer"),
        ("from ray.util import sgd", "sgd.torch.TorchTrainer"),
    ],
)
def test_every_way_to_import_leads_to_the_same_trainer(copies: Copies, statement: str, name: str) -> None:
    assert copies.printed(f"from hpc_det.sgd import TorchTrainer\n{statement}\nprint({name} is TorchTrainer)") == "True"


def test_names_of_raysgd_are_hpc_dets_own(copies: Copies) -> None:
    code = (
        "import hpc_det.sgd as ours\n"
        "from ray.util.sgd.torch import BaseTorchTrainable, CreatorOperator, TrainingOperator\n"
        "from ray.util.sgd.torch.training_operator import get_test_operator, get_test_metrics_operator\n"
        "from ray.util.sgd import utils\n"
        "built = TrainingOperator.from_creators(model_creator=len, optimizer_creator=len)\n"
        "trainable = ours.TorchTrainer.as_trainable(training_operator_cls=TrainingOperator)\n"
        "print(TrainingOperator is ours.TrainingOperator, issubclass(built, CreatorOperator),\n"
        "      issubclass(trainable, BaseTorchTrainable), utils.BATCH_SIZE == ours.BATCH_SIZE,\n"
        "      utils.AverageMeter is ours.AverageMeter)\n"
    )
    assert copies.printed(code) == "True True True True True"


def test_the_names_of_utils_and_constants(copies: Copies) -> None:
    code = (
        "from ray.util.sgd.utils import (AverageMeter, AverageMeterCollection, BATCH_COUNT, BATCH_SIZE, NUM_SAMPLES,\n"
        "    TimerCollection, TimerStat, check_for_failure, find_free_port, override)\n"
        "from ray.util.sgd.torch.constants import NCCL_TIMEOUT_S, NUM_STEPS, SCHEDULER_STEP_MANUAL, USE_FP16\n"
        "timer = TimerStat(window_size=3)\n"
        "with timer: pass\n"
        "print(BATCH_SIZE, NUM_STEPS, USE_FP16, SCHEDULER_STEP_MANUAL, NCCL_TIMEOUT_S, 0 <= timer.mean < 60)"
    )
    assert copies.printed(code) == "*batch_size __num_steps__ __use_fp16__ manual 1800 True"


def test_the_names_of_tune(copies: Copies) -> None:
    code = (
        "from ray import tune\n"
        "from ray.tune import CLIReporter, choice, grid_search, loguniform, run, sample_from, uniform\n"
        "from ray.tune.schedulers import ASHAScheduler, AsyncHyperBandScheduler, PopulationBasedTraining\n"
        "from ray.tune.logger import pretty_print\n"
        "from ray.tune.utils import merge_dicts\n"
        "from ray.tune.utils.mock import FailureInjectorCallback\n"
        "from ray.tune.utils.release_test_util import ProgressCallback\n"
        "from ray.tune.trainable import Trainable\n"
        "import hpc_det.sgd.tune as ours\n"
        "FailureInjectorCallback(time_between_checks=90), ProgressCallback()\n"
        "print(Trainable is ours.Trainable is tune.Trainable, tune.schedulers.ASHAScheduler is ASHAScheduler,\n"
        "      tune.uniform(1, 2) == ours.uniform(1, 2))\n"
    )
    assert copies.printed(code) == "True True True"


def test_init_shutdown_and_the_resources(copies: Copies) -> None:
    code = (
        "import os, ray\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "print(ray.is_initialized(), end=' ')\n"
        "ray.init()\n"
        "ray.init(ignore_reinit_error=True)\n"
        "print(ray.is_initialized(), ray.cluster_resources() == {'CPU': len(os.sched_getaffinity(0))}, end=' ')\n"
        "ray.shutdown()\n"
        "print(ray.is_initialized(), ray.util.client.ray.is_connected())\n"
    )
    assert copies.printed(code) == "False True True False False"


def test_the_address_of_a_cluster_is_accepted_with_a_note(copies: Copies) -> None:
    said = copies.printed("import ray; ray.init(address='auto', num_cpus=2, num_gpus=None, log_to_driver=True)")
    assert len(said.splitlines()) == 1
    assert not unnamed(said, "ray.init", "address='auto'", "num_cpus=2", "no effect")
    assert unnamed(said, "num_gpus", "log_to_driver") == ["num_gpus", "log_to_driver"]


def test_init_twice_is_refused_as_by_ray(copies: Copies) -> None:
    refusal = copies.refusal("import ray; ray.init(); ray.init()")
    assert not unnamed(refusal, "RuntimeError", "ray.init", "ray.shutdown()", "ignore_reinit_error")


@pytest.mark.parametrize("name", ["remote", "get", "put", "wait", "kill"])
def test_tasks_and_actors_are_refused_with_what_to_do(copies: Copies, name: str) -> None:
    refusal = copies.refusal(f"import ray; ray.{name}(len)")
    assert not unnamed(refusal, "NoTasks", f"ray.{name}", "apply_all_workers", "submitit", PAGE)


def test_the_decorator_of_actors_is_refused(copies: Copies) -> None:
    assert "NoTasks" in copies.refusal("import ray\n@ray.remote\nclass Actor: pass")
    assert "NoTasks" in copies.refusal("import ray\n@ray.remote(num_cpus=2)\ndef task(): pass")


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        ("import ray.rllib", "ModuleNotFoundError", "ray.rllib"),
        ("from ray import rllib", "ModuleNotFoundError", "ray.rllib"),
        ("import ray.util.queue", "ModuleNotFoundError", "ray.util.queue"),
        ("from ray.util.sgd import TFTrainer", "ModuleNotFoundError", "ray.util.sgd.TFTrainer"),
        ("import ray.util.sgd.data.dataset", "ModuleNotFoundError", "ray.util.sgd.data"),
        ("import ray.util.sgd.torch.worker_group", "ModuleNotFoundError", "ray.util.sgd.torch.worker_group"),
        ("from ray.util.sgd.v2 import Trainer", "ModuleNotFoundError", "ray.util.sgd.v2"),
        ("from ray.tune.suggest.optuna import OptunaSearch", "ModuleNotFoundError", "ray.tune.suggest.optuna"),
        (
            "from ray.tune.schedulers import HyperBandScheduler",
            "ModuleNotFoundError",
            "ray.tune.schedulers.HyperBandScheduler",
        ),
        ("from ray import tune; tune.report(loss=1)", "AttributeError", "ray.tune.report"),
        ("import ray; ray.serve", "AttributeError", "ray.serve"),
        ("import ray; ray.util.ActorPool", "AttributeError", "ray.util.ActorPool"),
    ],
)
def test_what_hpc_det_does_not_have_is_named(copies: Copies, code: str, kind: str, name: str) -> None:
    assert not unnamed(copies.refusal(code), kind, name, "hpc_det", PAGE)


def test_nothing_heavy_is_loaded_with_ray_itself() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'submitit'} & set(sys.modules)"
    assert printed(f"import sys, ray; ray.init(); print({heavy})") == "set()"


def test_a_gpu_that_is_not_there_is_refused(copies: Copies) -> None:
    code = (
        "import os\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "from ray.util.sgd.torch import TorchTrainer, TrainingOperator\n"
        "TorchTrainer(training_operator_cls=TrainingOperator, use_gpu=True, num_workers=2)\n"
    )
    assert not unnamed(copies.refusal(code), "use_gpu", "True", "GPU", "'auto'")


# --- the residual networks


@pytest.mark.parametrize(
    ("name", "parameters"),
    # counts of kuangliu/pytorch-cifar's networks of these names, from which RaySGD has them
    [
        ("ResNet18", 11_173_962),
        pytest.param("ResNet34", 21_282_122, marks=pytest.mark.long),
        pytest.param("ResNet50", 23_520_842, marks=pytest.mark.long),
    ],
)
def test_residual_networks_have_the_known_numbers_of_parameters(copies: Copies, name: str, parameters: int) -> None:
    code = (
        f"import torch\nfrom ray.util.sgd.torch.resnet import {name}\n"
        f"with torch.device('meta'): net = {name}({{}})\n"
        "print(sum(parameter.numel() for parameter in net.parameters()))"
    )
    assert copies.printed(code) == str(parameters)


@pytest.mark.long
@pytest.mark.parametrize(("name", "layers"), [("ResNet101", 101), ("ResNet152", 152)])
def test_deeper_networks_have_as_many_layers_as_their_names_say(copies: Copies, name: str, layers: int) -> None:
    code = (
        f"import torch\nfrom torch import nn\nfrom ray.util.sgd.torch.resnet import {name}\n"
        f"with torch.device('meta'): net = {name}(None)\n"
        "print(sum(isinstance(m, (nn.Conv2d, nn.Linear)) for n, m in net.named_modules() if 'shortcut' not in n))"
    )
    assert copies.printed(code) == str(layers)


def test_a_residual_network_classifies_small_images(copies: Copies) -> None:
    code = (
        "import torch\nfrom ray.util.sgd.torch.resnet import Bottleneck, ResNet\n"
        "net = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=7)\n"
        "print(tuple(net(torch.rand(2, 3, 32, 32)).shape), 'layer3.0.shortcut.1.running_mean' in net.state_dict())"
    )
    assert copies.printed(code) == "(2, 7) True"


def test_the_points_on_a_line(copies: Copies) -> None:
    code = (
        "from ray.util.sgd.torch.examples.train_example import LinearDataset, data_creator, model_creator\n"
        "from ray.util.sgd.torch.examples.train_example import optimizer_creator, scheduler_creator\n"
        "points = LinearDataset(2, 5, size=100)\n"
        "train, validation = data_creator({'batch_size': 20, 'val_size': 40})\n"
        "print(len(points), [round(v.item(), 4) for v in points[30]], len(train), len(validation))\n"
    )
    assert copies.printed(code) == "100 [3.0, 11.0] 50 2"


def test_without_the_hook_there_is_no_ray() -> None:
    assert python("-c", "import ray").stderr.endswith("ModuleNotFoundError: No module named 'ray'\n")
