"""A launcher for what is not about launchers: its ranks are forked from a process that has loaded torch.

`launcher` is hpc_det.launch.direct but for what it starts: a `stand_in`, which has the `server` fork the rank, and
lives and dies with it.
"""
