"""The schedulers: Slurm, PBS and the local machine.

Each one has command builders, output parsers and one table of states.
"""
