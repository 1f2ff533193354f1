"""A launcher for tests that do not depend on launchers: its ranks are forked from a process that has loaded torch.

`launcher` differs from hpc_det.launch.direct only in the process that it starts: a `stand_in`, which asks the `server`
to fork the rank. The two end together.
"""
