"""The methods of the context of a DeepSpeedTrial, with real engines on real ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch.deepspeed import DeepSpeedTrialContext, ModelParallelUnit
from tests.distributed.ranks import OnRanks
from tests.facts import each_names
from tests.pytorch.deepspeed.engines import config, new_engine, new_pipeline


def new_context(distributed: Distributed, **hparams: Any) -> DeepSpeedTrialContext:
    optimizations = hparams.pop("optimizations", {})
    config = {"name": "digits", "optimizations": optimizations}
    spec = {"experiment_id": 12, "trial_id": 3, "trial_seed": 777, "hparams": hparams, "config": config}
    return DeepSpeedTrialContext(spec, distributed)


def refusal(call: Callable[..., Any], *arguments: Any) -> list[str]:
    try:
        call(*arguments)
    except UsageError as error:
        return error.problems
    return []


# --- one rank


def before_an_engine(distributed: Distributed) -> dict[str, Any]:
    context = new_context(distributed)
    return {
        "unit": context.mpu,
        "flags": (context.use_pipeline_parallel, context.auto_grad_accumulation, context.to_device_automatically),
        "evaluates together": context.evaluates_together,
        "no numbers": refusal(context.get_train_micro_batch_size_per_gpu),
        "nor the other": refusal(context.get_num_micro_batches_per_slot),
        "set_mpu": refusal(context.set_mpu, context.mpu),
        "check": refusal(context.check),
        "wrap": refusal(context.wrap_model_engine, (torch.nn.Linear(2, 1), None)),
    }


def test_without_an_engine_a_context_says_what_is_missing(on_ranks: OnRanks) -> None:
    [said] = on_ranks(1, before_an_engine)
    assert said["unit"] == ModelParallelUnit(0, 1, True, True)
    assert said["flags"] == (False, True, False)
    assert said["evaluates together"] is False
    for refusals in ("no numbers", "nor the other"):
        each_names(said[refusals], ["context.wrap_model_engine"])
    each_names(said["set_mpu"], ["set_mpu: ", "wrap_model_engine"])
    each_names(said["check"], ["__init__", "context.wrap_model_engine"])
    each_names(said["wrap"], ["wrap_model_engine: ", "tuple", "deepspeed.initialize"])


def with_engines(distributed: Distributed) -> dict[str, Any]:
    context = new_context(distributed, global_batch_size=12)
    first = new_engine(distributed, config(2, micro=4, gas=3))
    returned = context.wrap_model_engine(first)
    context.check()
    said: dict[str, Any] = {
        "returned": returned is first and context.models == [first],
        "numbers": (context.get_train_micro_batch_size_per_gpu(), context.get_num_micro_batches_per_slot()),
        "properties": (context.train_micro_batch_size_per_gpu, context.num_micro_batches_per_slot),
        "per slot": context.get_per_slot_batch_size(),
        "hparam": context.get_hparam("global_batch_size"),
        "stage 2 evaluates together": context.evaluates_together,
        "again": refusal(context.wrap_model_engine, first),
        "pipeline": refusal(context.wrap_model_engine, new_pipeline(distributed, config(0), stages=1)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        context.wrap_model_engine(new_engine(distributed, config(0, micro=4, gas=3)))
        said["like the first"] = [str(each.message) for each in caught if each.category is UserWarning]
        context.wrap_model_engine(new_engine(distributed, config(3, micro=2, gas=1)))
        said["unlike the first"] = [str(each.message) for each in caught if each.category is UserWarning]
    said["stage 3 evaluates together"] = context.evaluates_together
    said["engines"] = len(context.models)
    return said


def test_the_first_engine_says_how_large_batches_are(on_ranks: OnRanks) -> None:
    [said] = on_ranks(1, with_engines)
    assert said["returned"]
    assert said["numbers"] == said["properties"] == (4, 3)
    assert said["per slot"] == said["hparam"] == 12
    assert said["engines"] == 3
    assert (said["stage 2 evaluates together"], said["stage 3 evaluates together"]) == (False, True)
    each_names(said["again"], ["wrap_model_engine: ", "already"])
    each_names(said["pipeline"], ["wrap_model_engine: ", "PipelineEngine", "DeepSpeedEngine"])
    assert said["like the first"] == []
    both = [
        f"train_micro_batch_size_per_gpu {micro}, gradient_accumulation_steps {gas}" for micro, gas in ((2, 1), (4, 3))
    ]
    each_names(said["unlike the first"], ["wrap_model_engine: ", *both])


def settings_of(distributed: Distributed) -> dict[str, Any]:
    context = new_context(
        distributed, global_batch_size=64, optimizations={"aggregation_frequency": 4, "mixed_precision": "O1"}
    )
    context.wrap_model_engine(new_engine(distributed, config(0, micro=4)))
    context.disable_auto_grad_accumulation()
    context.disable_dataset_reproducibility_checks()
    said: dict[str, Any] = {
        "flags": (context.auto_grad_accumulation, context.checks_dataset_reproducibility),
        "others": refusal(context.check),
        "fractions": refusal(
            context.wrap_model_engine,
            new_engine(distributed, {"train_micro_batch_size_per_gpu": 2.0, "gradient_accumulation_steps": 2.0}),
        ),
    }
    context.wrap_mpu(ModelParallelUnit(0, 1, True, False))
    said["unit"] = context.mpu
    said["second unit"] = refusal(context.set_mpu, context.mpu)
    return said


def test_settings_that_fit_are_taken_and_others_refused(on_ranks: OnRanks) -> None:
    [said] = on_ranks(1, settings_of)
    assert said["flags"] == (False, False)
    assert said["unit"] == ModelParallelUnit(0, 1, True, False)
    each_names(said["second unit"], ["set_mpu: ", "ModelParallelUnit", "already"])
    others: list[list[object]] = [
        ["optimizations.aggregation_frequency: ", 4, "gradient_accumulation_steps"],
        ["optimizations.mixed_precision: ", "'O1'", "fp16.enabled", "bf16.enabled"],
        [
            "hyperparameters.global_batch_size: ",
            64,
            "train_batch_size",
            "(train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 1, data-parallel size 1)",
            "overwrite_deepspeed_config",
        ],
    ]
    each_names(said["others"], *others)
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    each_names(said["fractions"], *[[f"deepspeed config: {name}: ", 2.0] for name in names])


def off_cluster(distributed: Distributed) -> dict[str, Any]:
    """Run the example in the documentation of from_config, outside the gang of this rank."""
    space = {"lr": {"type": "double", "minval": 0.1, "maxval": 0.2}, "deepspeed_config": "ds_config.json"}
    context = DeepSpeedTrialContext.from_config({"hyperparameters": space})
    engine = context.wrap_model_engine(new_engine(context.distributed, config(1)))
    context.check()
    batch = context.to_device([torch.ones(2, 8), torch.ones(2)])
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return {"kind": type(context), "lr": context.get_hparam("lr"), "steps": engine.global_steps}


def test_off_cluster_an_engine_trains_alone(on_ranks: OnRanks) -> None:
    [said] = on_ranks(1, off_cluster)
    assert said["kind"] is DeepSpeedTrialContext
    assert 0.1 <= said["lr"] <= 0.2
    assert said["steps"] == 1


# --- gangs


def plain_gang(distributed: Distributed) -> dict[str, Any]:
    context = new_context(distributed, global_batch_size=16)
    context.wrap_model_engine(new_engine(distributed, config(1, micro=4, gas=2)))
    context.check()
    said: dict[str, Any] = {"unit": context.mpu, "together": context.evaluates_together}
    said["wrong unit"] = refusal(context.set_mpu, ModelParallelUnit(2, 4, True, True))
    context.set_mpu(ModelParallelUnit(0, 1, distributed.is_chief, True))
    return {**said, "one copy": refusal(context.check), "one copy together": context.evaluates_together}


def test_a_gang_of_copies_agrees_on_the_batch_or_says_why_not(on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, plain_gang)
    assert [said["unit"] for said in (first, second)] == [ModelParallelUnit(rank, 2, True, True) for rank in (0, 1)]
    assert not first["together"]
    wrong_unit = ["ModelParallelUnit.data_parallel_world_size: ", "4 copies", "2 ranks"]
    each_names(first["wrong unit"], wrong_unit)
    assert first["one copy"] == second["one copy"]
    one_copy = [
        "deepspeed config: train_batch_size is 16",
        "train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 2, data-parallel size 1 of 2 ranks make 8",
        "data-parallel size is 2",
        "deepspeed.initialize",
        "context.set_mpu",
    ]
    each_names(first["one copy"], one_copy)
    assert first["one copy together"]


def pipelines(distributed: Distributed, stages: int, others: int | None) -> dict[str, Any]:
    """Return the facts about a context with a pipeline. `others`: the stages of a second engine."""
    context = new_context(distributed)
    plain = new_engine(distributed, config(0))  # DeepSpeed cannot create one after a pipeline
    context.wrap_model_engine(new_pipeline(distributed, config(1, micro=2, gas=3), stages=stages))
    context.check()
    said: dict[str, Any] = {
        "unit": context.mpu,
        "flags": (context.use_pipeline_parallel, context.auto_grad_accumulation, context.evaluates_together),
    }
    if others:
        said["plain"] = refusal(context.wrap_model_engine, plain)
        other = new_pipeline(distributed, config(1, micro=2, gas=3), stages=others)
        said["other"] = refusal(context.wrap_model_engine, other)
    context.set_mpu(ModelParallelUnit(context.mpu.data_parallel_rank, context.mpu.data_parallel_world_size, True, True))
    context.check()
    return {**said, "own unit": context.mpu}


def test_a_pipeline_sets_the_unit_and_a_trial_may_set_another(on_ranks: OnRanks) -> None:
    first, last = on_ranks(2, pipelines, 2, None)
    assert (first["unit"], last["unit"]) == (ModelParallelUnit(0, 1, False, True), ModelParallelUnit(0, 1, True, True))
    assert first["flags"] == last["flags"] == (True, False, True)
    assert first["own unit"] == last["own unit"] == ModelParallelUnit(0, 1, True, True)


def test_pipelines_side_by_side_share_out_the_data(on_ranks: OnRanks) -> None:
    """Ranks 0 and 1 are the first stage of two pipelines, 2 and 3 the last."""
    ranks = on_ranks(4, pipelines, 2, 1)
    assert [said["unit"] for said in ranks] == [
        ModelParallelUnit(pipeline, 2, stage == 1, True) for stage, pipeline in itertools.product(range(2), range(2))
    ]
    for rank, said in enumerate(ranks):
        each_names(said["plain"], ["wrap_model_engine: ", "DeepSpeedEngine", "PipelineEngine"])
        other = ["wrap_model_engine: ", f"rank {rank}", f"pipeline {rank} of 4", f"{rank % 2} of 2", "PipelineModules"]
        each_names(said["other"], other)
