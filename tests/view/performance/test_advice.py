"""Advice: it names existing settings, with values that follow from the measurements."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpc_det.config.schema import Experiment
from hpc_det.config.section import keys_at
from hpc_det.store.folders import TrialFolder
from hpc_det.view.performance.advice import Advice, advice
from hpc_det.view.performance.limits import Kind, Verdict
from hpc_det.view.performance.measured import Conditions, measured
from tests.facts import unnamed
from tests.view.performance.profiles import gpus, sample, stretch
from tests.view.performance.test_limits import CONDITIONS


def advised(trial: TrialFolder, kind: Kind, **changes: Any) -> list[Advice]:
    found = measured(trial)
    rank = found.ranks[0] if kind is Kind.SLOW_RANK else None
    return advice(Verdict(kind=kind, share=0.41, rank=rank), Conditions(**{**vars(CONDITIONS), **changes}), found)


def settings(found: list[Advice]) -> list[str]:
    return [its.setting for its in found if its.setting]


@pytest.fixture
def profiled(trial: TrialFolder) -> TrialFolder:
    for rank in (0, 1):
        stretch(trial, rank, exposed_s=4.0)
    return trial


@pytest.mark.parametrize("kind", Kind)
def test_every_verdict_has_advice_whose_settings_exist(profiled: TrialFolder, kind: Kind) -> None:
    sample(profiled, at=1, gpus=gpus(a=20))
    found = advised(profiled, kind)
    assert found
    for setting in settings(found):
        is_key = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)*)(?:: .+)?", setting)
        is_call = re.match(r"(DataLoader|context\.[a-z_.]+)\(", setting)
        assert (is_key and _exists(is_key[1])) or is_call or setting.startswith("hpc-det "), setting


def _exists(path: str) -> bool:
    """Return whether this is a key of the configuration; below a free-form key, every key is."""
    *above, key = path.split(".")
    known = keys_at(Experiment, above)
    return key in known if known is not None else _exists(".".join(above))


@pytest.mark.parametrize("path", ["optimizations.aggregation_frequenzy", "optimization.aggregation_frequency"])
def test_a_setting_that_does_not_exist_is_caught(path: str) -> None:
    assert not _exists(path)


def test_gradients_are_exchanged_so_seldom_that_little_of_it_is_seen(profiled: TrialFolder) -> None:
    assert "optimizations.aggregation_frequency: 14" in settings(advised(profiled, Kind.COMMUNICATION))


def test_fewer_nodes_are_advised_to_several(profiled: TrialFolder) -> None:
    setting = "resources.is_single_node: true"
    assert setting not in settings(advised(profiled, Kind.COMMUNICATION))
    assert setting in settings(advised(profiled, Kind.COMMUNICATION, nodes=2))


def test_what_is_set_already_is_not_advised_and_numbers_go_on_from_it(profiled: TrialFolder) -> None:
    done = {"aggregation_frequency": 2, "gradient_compression": True, "auto_tune_tensor_fusion": True}
    found = settings(advised(profiled, Kind.COMMUNICATION, config={"optimizations": done}))
    assert "optimizations.aggregation_frequency: 28" in found
    assert not [setting for setting in found if "compression" in setting or "fusion" in setting]


def test_half_precision_is_no_advice_where_it_is_set(profiled: TrialFolder) -> None:
    assert "optimizations.mixed_precision: O1" in settings(advised(profiled, Kind.WELL_USED))
    config = {"optimizations": {"mixed_precision": "O1"}}
    assert not [its for its in settings(advised(profiled, Kind.WELL_USED, config=config)) if "precision" in its]


def test_metrics_that_take_long_to_reduce_come_first(trial: TrialFolder) -> None:
    for rank in (0, 1):
        stretch(trial, rank, exposed_s=0.0, seconds={"reduce_metrics": 3.0, "train_batch": 6.5})
    found = settings(advised(trial, Kind.COMMUNICATION, config={"scheduling_unit": 5}))
    assert found[:2] == ["optimizations.average_training_metrics: false", "scheduling_unit: 50"]


def test_more_workers_are_no_advice_where_the_cores_are_busy(profiled: TrialFolder) -> None:
    assert "num_workers=6" in settings(advised(profiled, Kind.DATA_LOADER))[0]
    sample(profiled, at=1, cpu_util=97.0)
    found = advised(profiled, Kind.DATA_LOADER)
    assert not [setting for setting in settings(found) if "num_workers" in setting]
    assert not unnamed(found[0].text, "cores")


def test_copies_to_the_host_have_other_advice_than_copies_to_the_device(trial: TrialFolder) -> None:
    stretch(trial, seconds={"from_device": 3.0})
    assert ".item()" in advised(trial, Kind.COPY)[0].text


def test_a_node_is_kept_away_from_as_the_scheduler_takes_it(profiled: TrialFolder) -> None:
    assert "slurm.sbatch_args: [--exclude=n1]" in settings(advised(profiled, Kind.SLOW_RANK))
    assert not settings(advised(profiled, Kind.SLOW_RANK, scheduler="pbs"))


def test_without_a_number_for_the_batch_there_is_none_to_try(profiled: TrialFolder) -> None:
    assert "hyperparameters.global_batch_size: 64" in settings(advised(profiled, Kind.IDLE_GPUS))
    assert not [its for its in settings(advised(profiled, Kind.IDLE_GPUS, hparams={})) if "batch_size" in its]
