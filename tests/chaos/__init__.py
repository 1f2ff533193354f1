"""What is left when a process is killed, a disk fails or the power is cut, at every change on the disk.

`make chaos` tries everything, and prints what was tried, what survived, and what was lost; `make test` and
`make test-long` try samples.
"""
