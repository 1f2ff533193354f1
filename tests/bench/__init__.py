"""Benchmarks: printed, not timed tests. `make bench`, or one of them: `python -m tests.bench.notice_to_checkpoint`."""
