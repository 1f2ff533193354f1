# A script in the style of Determined's Core API, as a user would write it: it counts, saves, resumes and stops.
import argparse
import logging
import os
import pathlib
import time

import determined as det


def restore(core_context, latest_checkpoint, trial_id):
    if latest_checkpoint is None:
        return 0, 0
    with core_context.checkpoint.restore_path(latest_checkpoint) as path:
        total, steps, owner = map(int, (path / "count").read_text().split(","))
    return total, steps if owner == trial_id else 0


def save(core_context, total, steps, trial_id):
    with core_context.checkpoint.store_path({"steps_completed": steps}) as (path, storage_id):
        assert isinstance(path, pathlib.Path)
        (path / "count").write_text(f"{total},{steps},{trial_id}")
    logging.info(f"saved {storage_id} at {steps}")


def main(core_context, info, args):
    by = info.trial.hparams["increment"]
    if by > 100:
        raise det.InvalidHP("too large an increment")
    trial_id = info.trial.trial_id
    total, begin = restore(core_context, info.latest_checkpoint, trial_id)
    is_chief = core_context.distributed.rank == 0
    for steps in range(begin + 1, args.steps + 1):
        total += sum(core_context.distributed.allgather(by))
        if steps % 5:
            continue
        if is_chief:
            core_context.train.report_training_metrics(steps_completed=steps, metrics={"total": total})
            core_context.train.report_progress(steps / args.steps)
            core_context.train.report_validation_metrics(steps_completed=steps, metrics={"rate": total / steps})
            save(core_context, total, steps, trial_id)
        while steps == args.wait_at and begin < steps and not core_context.preempt.should_preempt():
            time.sleep(0.01)
        if core_context.preempt.should_preempt():
            logging.info(f"stops at {steps}")
            return
    logging.info(f"counted to {total}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--wait-at", type=int, default=0)
    info = det.get_cluster_info()
    assert info is not None
    assert info.task_type == "TRIAL"
    assert len(info.container_addrs) == 1
    ranks = det.core.DistributedContext.from_torch_distributed() if "GROUP_RANK" in os.environ else None
    with det.core.init(distributed=ranks) as core_context:
        main(core_context, info, parser.parse_args())
