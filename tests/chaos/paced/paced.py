"""The story of the end-to-end tests, trained batch by batch as a test permits."""

import os
import time
from pathlib import Path

from model_def import StoryTrial

from hpc_det.store.attempt import read_stop

LOOK_S, AFTER_A_STOP_S = 0.005, 0.5


class PacedTrial(StoryTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        self._await_leave(batch_idx)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def _await_leave(self, batch_idx: int) -> None:
        """Wait until the file $CHAOS_PACE permits this batch. After a stop request, train on slowly: the ranks still
        have to agree on the stop.
        """
        while batch_idx >= int(Path(os.environ["CHAOS_PACE"]).read_text()):
            if read_stop(Path(os.environ["HPC_DET_FOLDER"], "stop.json"), int(os.environ["HPC_DET_NUMBER"])):
                time.sleep(AFTER_A_STOP_S)
                return
            time.sleep(LOOK_S)
