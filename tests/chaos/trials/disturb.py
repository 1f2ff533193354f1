"""Send signals as a scheduler does, at the moment of a training that a schedule has drawn.

CHAOS_PLAN is {ATTEMPT: [{"where", "at", "signals", "to", "rank"}, ...]}: at the first `where` in batch `at` or later,
this rank sends the signals to the node's agent, to itself, or to both, and waits until the rank has noticed the stop
request.
"""

import gc
import json
import os
import signal
import socket
import time

from hpc_det.core.portable import Portable
from hpc_det.distributed.preempt import StopAgreement
from hpc_det.node.agent_socket import peer_of
from hpc_det.pytorch import PyTorchCallback

PATIENCE_S = 90
"""Seconds to wait for the effect of a signal. Less than a test waits for the training, so that its log shows which
signal had none.
"""


class Disturber:
    def __init__(self, context):
        plan = json.loads(os.environ.get("CHAOS_PLAN", "{}"))
        self.rank = context.distributed.get_rank()
        self.left = [each for each in plan.get(os.environ["HPC_DET_NUMBER"], []) if each["rank"] == self.rank]
        if any(each["where"] == "write" for each in self.left):
            self._disturb_writers()
        self.batch = 0  # the current batch, or the last one
        self("init")

    def __call__(self, where):
        for each in [each for each in self.left if each["where"] == where and self.batch >= each["at"]]:
            self.left.remove(each)
            for name in each["signals"]:
                for pid in self._targets(each["to"]):
                    os.kill(pid, getattr(signal, name))
            print(f"chaos: {each} in batch {self.batch}", flush=True)
            until_noticed()

    def _targets(self, to):
        return [pid for name, pid in (("agent", agent()), ("rank", os.getpid())) if to in (name, "both")]

    def _disturb_writers(self):
        """Send the signals from the thread that writes a checkpoint, when the files are written and nothing is
        committed.
        """
        write = Portable.write

        def disturbed(portable, folder, steps):
            entries = write(portable, folder, steps)
            self("write")
            return entries

        Portable.write = disturbed


def agent():
    """Return the PID of the process that listens to the ranks of this node (unix(7), SO_PEERCRED)."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["HPC_DET_SOCKET"])
        return peer_of(line)[0]


def until_noticed():
    (agreement,) = [each for each in gc.get_objects() if issubclass(type(each), StopAgreement)]
    end = time.monotonic() + PATIENCE_S
    while not agreement.noticed:
        assert time.monotonic() < end, "the signal had no effect"
        time.sleep(0.001)


class Hooks(PyTorchCallback):
    """Sends signals around all events between batches."""

    def __init__(self, context, disturb):
        self.context = context
        self.disturb = disturb
        self.seen = {"reports": 0, "validations": 0, "saves": 0}

    def state_dict(self):
        return {"seen": {name: count for name, count in self.seen.items() if name != "saves"}}

    def load_state_dict(self, state_dict):
        self.seen |= state_dict["seen"]

    def on_training_start(self):
        self.disturb.batch = self.context.get_initial_batch()
        self.disturb("ready")

    def on_training_epoch_end(self, epoch_idx):
        self.disturb("epoch end")

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        self.seen["reports"] += 1
        self.disturb("report")

    def on_validation_end(self, metrics):
        self.seen["validations"] += 1
        self.disturb("validation end")

    def on_checkpoint_save_start(self, checkpoint):
        self.disturb("save")

    def on_checkpoint_upload_end(self, uuid):
        self.disturb("committed")
