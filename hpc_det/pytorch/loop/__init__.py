"""The training loop, and what enters it: the harness of a trial and the Trainer."""
