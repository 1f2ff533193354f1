"""Measurements of a training with `profiling.enabled`: how its time is spent, and the load of its nodes.

  measurements   the measured batches, the names of timings, and a line for each stretch of batches
  timer          seconds by name
  system         a line for each sample of the node and its GPUs

Without profiling, none of this is in the loop: timed functions replace plain ones at the start.
"""
