"""python merge.py CHECKPOINT FOLDER: write the model with its adapters merged, for `from_pretrained(FOLDER)`."""

import sys

from hpc_det.pytorch import load_trial_from_checkpoint_path

checkpoint, folder = sys.argv[1:]
load_trial_from_checkpoint_path(checkpoint).save_merged(folder)
