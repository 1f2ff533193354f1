"""Measurements of a training with `profiling.enabled`: how its time is spent, and the load of its nodes.

  measurements   the measured batches, the names of timings, and a line for each stretch of batches
  timer          seconds by name
  system         a line for each sample of the node and its GPUs

Without profiling the loop executes none of this: timed functions replace the original ones only at the start of a
training with profiling.
"""
