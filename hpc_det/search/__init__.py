"""Which trials to run: pure functions."""
