"""Tests of the state that remains when a process is killed, a disk fails or the power is cut, at every change on the
disk.

`make chaos` tries everything, and prints the numbers of attempts, survivals and losses; `make test` and `make
test-long` try samples.
"""
