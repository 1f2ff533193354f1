"""Hooks: who is told when an experiment runs, rests or ends. On login nodes and in jobs: the standard library only."""
