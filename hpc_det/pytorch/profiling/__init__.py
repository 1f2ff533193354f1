"""Where the time of training goes, and what the nodes do meanwhile: measured while `profiling.enabled` says so.

    measurements   which batches are measured, and what counts as what
    timer          seconds by name
    timings        a line for each stretch of measured batches
    communication  how long DDP's exchange of gradients keeps a rank waiting
    system         a line for each look at the node; gpus: what the NVIDIA driver says
    lines          how they reach the file

Where nothing is measured, nothing of this is in the loop: timed functions take the place of plain ones at the start.
"""
