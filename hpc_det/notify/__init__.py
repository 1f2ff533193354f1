"""Hooks that are called when an experiment runs, pauses or ends, on login nodes and in jobs: standard library only."""
