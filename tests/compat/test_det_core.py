"""`determined.core` in one process and without an experiment."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.committed import committed
from hpc_det.compat import det_core, det_core_v2
from hpc_det.compat.det_core.sharded import merged
from hpc_det.distributed.preempt import give_notice
from hpc_det.errors import HpcDetError, InvalidHP
from hpc_det.node.json_files import read_json
from hpc_det.store.metrics import read_reports
from tests.facts import refused


@pytest.fixture
def context() -> Iterator[det_core.Context]:
    with det_core.init() as context:
        yield context


def folder(context: det_core.Context) -> Any:
    return context._session.run.folder


def saved(context: det_core.Context, steps: int, **files: str) -> str:
    with context.checkpoint.store_path({"steps_completed": steps, "note": "mine"}) as (path, uuid):
        for name, text in files.items():
            (path / name).write_text(text)
    return uuid


# --- checkpoints


def test_what_is_stored_is_restored(context: det_core.Context) -> None:
    uuid = saved(context, 3, state="three")
    with context.checkpoint.restore_path(uuid) as path:
        assert isinstance(path, Path)
        assert (path / "state").read_text() == "three"
    metadata = context.checkpoint.get_metadata(uuid)
    assert (metadata["steps_completed"], metadata["note"]) == (3, "mine")


def test_without_the_number_of_batches_nothing_is_committed(context: det_core.Context) -> None:
    for metadata in (None, {"note": 1}):
        with pytest.raises(ValueError, match="steps_completed"), context.checkpoint.store_path(metadata) as (path, _):
            (path / "state").write_text("x")
    assert not committed(folder(context).checkpoints)


def test_a_body_that_raises_commits_nothing(context: det_core.Context) -> None:
    with pytest.raises(ZeroDivisionError), context.checkpoint.store_path({"steps_completed": 1}):
        1 / 0  # noqa: B018
    assert not committed(folder(context).checkpoints)


def test_an_upload_takes_what_the_selector_takes(context: det_core.Context, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt", "c.bin"):
        (tmp_path / name).write_text(name)
    uuid = context.checkpoint.upload(tmp_path, {"steps_completed": 2}, selector=lambda name: name.endswith(".txt"))
    context.checkpoint.download(uuid, tmp_path / "all")
    files = {path.name for path in (tmp_path / "all").rglob("*") if path.is_file()}
    assert files == {"a.txt", "b.txt", "metadata.json"}
    context.checkpoint.download(uuid, tmp_path / "some", selector=lambda name: name.startswith("sub/"))
    assert [path.name for path in (tmp_path / "some").rglob("*") if path.is_file()] == ["b.txt"]


def test_an_upload_needs_a_folder(context: det_core.Context) -> None:
    for options in ({}, {"shard": True}, {"shard": True, "selector": bool}):
        with pytest.raises(RuntimeError):
            context.checkpoint.upload(None, {"steps_completed": 2}, **options)


def test_a_deleted_checkpoint_is_gone(context: det_core.Context) -> None:
    uuid = saved(context, 3)
    context.checkpoint.delete(uuid)
    for name in (uuid, "", "../x"):
        with pytest.raises(HpcDetError), context.checkpoint.restore_path(name):
            pass
        with pytest.raises(HpcDetError):
            context.checkpoint.delete(name)


def test_a_later_run_finds_the_checkpoints_of_an_earlier_one(tmp_path: Path) -> None:
    for options in ({}, {"checkpoint_storage": str(tmp_path / "mine")}):
        with det_core.init(**options) as first:  # type: ignore[arg-type]
            uuid = saved(first, 3, state="three")
        with det_core.init(**options) as second, second.checkpoint.restore_path(uuid) as path:  # type: ignore[arg-type]
            assert (path / "state").read_text() == "three"
    assert [path.parts[-1] for path in (tmp_path / "mine").glob("*/*")] == [uuid]


@pytest.mark.parametrize(
    ("storage", "error"), [("s3://bucket", ValueError), ({"type": "gcs", "bucket": "x"}, ValueError), (3, TypeError)]
)
def test_other_storage_is_refused_without_an_experiment(storage: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        det_core.init(checkpoint_storage=storage)


# --- reports


def test_reports_have_the_groups_of_determined(context: det_core.Context) -> None:
    context.train.report_training_metrics(5, {"loss": torch.tensor(2.0)}, [{"loss": 1.0}])
    context.train.report_progress(0.5)
    context.train.report_validation_metrics(steps_completed=10, metrics={"loss": 1.0, "raw": b"bytes"})
    context.train.report_metrics("other", 10, {"words": 3})
    context._session.chief._reports.flush()  # type: ignore[union-attr]
    found = [(each["kind"], each["steps"], each["metrics"]) for each in read_reports(folder(context).metrics)]
    assert found == [("training", 5, {"loss": 2.0}), ("validation", 10, {"loss": 1.0})]


def test_a_validation_metric_that_is_none_is_refused(context: det_core.Context) -> None:
    with pytest.raises(RuntimeError, match="loss"):
        context.train.report_validation_metrics(1, {"loss": None})
    context.train.report_training_metrics(1, {"loss": None})


@pytest.mark.parametrize("progress", [-0.1, 1.1])
def test_progress_is_a_fraction(context: det_core.Context, progress: float) -> None:
    with pytest.raises(ValueError, match="1"):
        context.train.report_progress(progress)


def test_facts_about_the_run(context: det_core.Context) -> None:
    assert context.train.get_metadata() is None
    assert context.train.set_metadata({"a": [1]}) == {"a": [1]}
    assert context.train.get_metadata() == {"a": [1]}
    assert context.train.get_tensorboard_path().is_dir()
    assert context.train.get_experiment_best_validation() is None
    context.train.set_status("busy")
    with pytest.raises(RuntimeError):
        context.train.upload_tensorboard_files()
    with pytest.raises(ValueError, match="experiment"):
        context.alert("title")


def test_the_script_writes_its_events_in_manual_mode() -> None:
    with det_core.init(tensorboard_mode=det_core.TensorboardMode.MANUAL) as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        context.train.upload_tensorboard_files()
        assert not [*context.train.get_tensorboard_path().iterdir()]


# --- search, stops, ends


def test_without_an_experiment_there_is_one_operation(context: det_core.Context) -> None:
    lengths = []
    for operation in context.searcher.operations():
        operation.report_progress(1)
        operation.report_completed(0.5)
        lengths.append(operation.length)
        with pytest.raises(RuntimeError, match="once"):
            operation.report_completed(0.5)
    assert lengths == [1]
    assert context.searcher.get_configured_units() is det_core.Unit.EPOCHS


def test_each_operation_must_be_completed(context: det_core.Context) -> None:
    with pytest.raises(RuntimeError, match="report_completed"):
        for _ in context.searcher.operations():
            pass


@pytest.mark.parametrize("mode", det_core.PreemptMode)
@pytest.mark.parametrize("auto_ack", [True, False])
def test_the_outcome_says_whether_the_stop_was_acknowledged(mode: det_core.PreemptMode, auto_ack: bool) -> None:
    with det_core.init(preempt_mode=mode) as context:
        place = folder(context)
        assert not context.preempt.should_preempt()
        run = context._session.run
        give_notice(run.distributed.messages)
        run.stop.wait_for_proposal()
        while not context.preempt.should_preempt(auto_ack=auto_ack):
            pass
        assert context.preempt.should_preempt(auto_ack=auto_ack)
    assert (read_json(place.outcome) or {})["kind"] == ("stopped" if auto_ack else "finished")


def test_before_the_block_nothing_can_be_asked() -> None:
    context = det_core.init()
    with pytest.raises(RuntimeError):
        context.preempt.should_preempt()
    with pytest.raises(RuntimeError):
        context.train.report_training_metrics(1, {})


def test_start_and_close_are_the_block() -> None:
    context = det_core.init()
    context.start()
    with pytest.raises(RuntimeError):
        context.start()
    place = folder(context)
    context.close()
    context.close()
    assert (read_json(place.outcome) or {})["kind"] == "finished"


@pytest.mark.parametrize(("leaving", "is_end"), [(SystemExit(0), True), (SystemExit(3), False), (KeyError(), False)])
def test_only_exit_code_0_is_a_normal_end(leaving: BaseException, is_end: bool) -> None:
    context = det_core.init()
    with pytest.raises(type(leaving)), context:  # noqa: PT012
        place = folder(context)
        raise leaving
    assert (read_json(place.outcome) is not None) is is_end


def test_invalid_hyperparameters_exit_with_0() -> None:
    with pytest.raises(SystemExit) as left, det_core.init():
        raise InvalidHP("no")
    assert left.value.code == 0


def test_the_generators_of_the_script_stay_as_they_are() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with det_core.init():
        assert torch.equal(torch.rand(1), expected)


# --- names


def test_positional_order_is_that_of_determined() -> None:
    def names(function: Any) -> list[str]:
        return [*inspect.signature(function).parameters]

    train, checkpoint = det_core.TrainContext, det_core.CheckpointContext
    assert names(train.report_training_metrics) == ["self", "steps_completed", "metrics", "batch_metrics"]
    assert names(train.report_validation_metrics) == ["self", "steps_completed", "metrics"]
    assert names(train.report_metrics) == ["self", "group", "steps_completed", "metrics"]
    assert names(checkpoint.upload) == ["self", "ckpt_dir", "metadata", "shard", "selector"]
    assert names(checkpoint.store_path) == ["self", "metadata", "shard"]
    assert names(checkpoint.restore_path) == ["self", "storage_id", "download_mode", "selector"]
    assert names(checkpoint.download) == ["self", "storage_id", "ckpt_dir", "download_mode", "selector"]
    assert names(det_core.SearcherContext.operations) == ["self", "searcher_mode", "auto_ack"]
    assert names(det_core.init) == ["distributed", "checkpoint_storage", "preempt_mode", "tensorboard_mode"]
    assert det_core.PreemptMode("CHIEF_ONLY") is det_core.PreemptMode.ChiefOnly
    assert det_core.DownloadMode("NO_SHARED_DOWNLOAD") is det_core.DownloadMode.NoSharedDownload


def test_a_selector_of_restore_path_is_said_to_have_no_effect(
    context: det_core.Context, caplog: pytest.LogCaptureFixture
) -> None:
    uuid = saved(context, 1)
    with caplog.at_level(logging.WARNING), context.checkpoint.restore_path(uuid, selector=bool):
        assert len(caplog.records) == 1


@pytest.mark.parametrize("field", ["sampling_interval", "samples_per_report"])
def test_the_profiler_refuses_what_determined_refuses(context: det_core.Context, field: str) -> None:
    context.profiler.on()
    context.profiler.off()
    with pytest.raises(ValueError, match=field):
        context.profiler.on(**{field: 0})


# --- ranks


SIX: dict[str, Any] = {"rank": 1, "size": 4, "local_rank": 1, "local_size": 2, "cross_rank": 0, "cross_size": 2}


def test_numbers_are_all_or_none() -> None:
    nothing: dict[str, Any] = dict.fromkeys(SIX)
    assert det_core.DistributedContext(**nothing).size == 1
    assert det_core.DistributedContext(**SIX, chief_ip="10.0.0.1").get_num_agents() == 2
    with pytest.raises(ValueError, match="cross_size"):
        det_core.DistributedContext(**{**SIX, "rank": None})
    with pytest.raises(AssertionError):
        det_core.DistributedContext(**SIX)


def test_numbers_come_from_the_environment_or_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "CROSS_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "CROSS_SIZE"):
        monkeypatch.setenv(name, "2")

    class Horovod:
        def __getattr__(self, name: str) -> Any:
            return lambda: 2 if name.endswith("size") else 1

    kind = det_core.DistributedContext
    for context in (kind.from_torch_distributed(), kind.from_deepspeed(), kind.from_horovod(Horovod())):
        assert (context.rank, context.size, context.local_size, context.cross_rank, context.cross_size) == (
            1,
            2,
            2,
            1,
            2,
        )


def test_a_single_rank_communicates_with_itself() -> None:
    context = det_core.DummyDistributedContext()
    assert context.allgather(3) == context.gather_local(3) == [3]
    assert context.broadcast(3) == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}], {"a": {"b": 1, "c": 2}, "d": 3}),
        ([{"a": 1}, {"a": 1}, {}], {"a": 1}),
    ],
)
def test_metadata_of_ranks_are_merged(given: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert merged(given) == expected


@pytest.mark.parametrize("other", [{"a": {"c": 2}}, {"a": 1}])
def test_metadata_that_differ_are_named_by_path(other: dict[str, Any]) -> None:
    with refused(RuntimeError, "/a"):
        merged([{"a": {"c": 1}}, other])


# --- core_v2


IDS: dict[str, Any] = {"external_experiment_id": "e 1", "external_trial_id": "t"}


def test_a_run_with_the_same_external_ids_continues() -> None:
    config = det_core_v2.Config(name="x", hparams={"a": 1}, data={"url": "here"}, **IDS)
    with det_core_v2.init_context(config=config) as first:
        assert first.info is not None
        assert (first.info.latest_checkpoint, first.info.trial.hparams) == (None, {"a": 1})
        uuid = saved(first, 3)
    with det_core_v2.init_context(defaults=det_core_v2.DefaultConfig(), unmanaged=config) as second:
        assert second.info is not None
        assert second.info.latest_checkpoint == uuid
        assert second.info.trial.trial_id == first.info.trial.trial_id
    with det_core_v2.init_context(config=det_core_v2.Config()) as other:
        assert other.info is not None
        assert other.info.latest_checkpoint is None


def test_the_globals_are_the_parts_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr("atexit.register", lambda function: None)
    det_core_v2.init(config=det_core_v2.Config())
    assert det_core_v2.train is not None
    det_core_v2.train.report_training_metrics(1, {"loss": 1.0})
    place = Path(det_core_v2.url_reverse_webui_exp_view())
    det_core_v2.close()
    assert (read_json(place / "outcome.json") or {})["kind"] == "finished"
    assert [getattr(det_core_v2, name) for name in ("train", "checkpoint", "info")] == [None] * 3
    det_core_v2.close()


@pytest.mark.parametrize("options", [{}, {"config": det_core_v2.Config(external_trial_id="t")}])
def test_core_v2_needs_a_configuration(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="core_v2"):
        det_core_v2.init_context(**options)
