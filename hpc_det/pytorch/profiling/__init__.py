"""Where the time of training goes, and what the nodes do meanwhile: measured while `profiling.enabled` says so.

    measurements   which batches are measured, what counts as what, and a line for each stretch of batches
    timer          seconds by name
    system         a line for each look at the node and its GPUs

Where nothing is measured, nothing of this is in the loop: timed functions take the place of plain ones at the start.
"""
