"""Benchmarks print figures and fail no test. `make bench` runs all, `python -m tests.benchmarks.X` one of them."""
