"""The behaviour of hpc_det beside that of the systems it follows: each row names the upstream file that has it.

The sentences and the data are this project's own. `table.py` counts the rows for docs/how-to/port-from-determined.md.
"""
