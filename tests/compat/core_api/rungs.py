# The style of Determined up to 0.37: the search requests one length after the other.
import determined as det

info = det.get_cluster_info()
assert info is not None
assert info.trial is not None

with det.core.init() as core_context:
    steps = 0
    if info.latest_checkpoint is not None:
        steps = core_context.checkpoint.get_metadata(info.latest_checkpoint)["steps_completed"]
    assert core_context.searcher.get_configured_units() == det.core.Unit.BATCHES
    for op in core_context.searcher.operations():
        while steps < op.length:
            steps += 1
            op.report_progress(steps)
        metrics = {"rate": info.trial.hparams["increment"]}
        core_context.train.report_validation_metrics(steps, metrics)
        with core_context.checkpoint.store_path({"steps_completed": steps}) as (path, _):
            (path / "steps").write_text(str(steps))
        op.report_completed(metrics["rate"])
        print(f"operation of {op.length} done", flush=True)
