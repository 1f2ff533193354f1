"""Hooks that are called when an experiment starts, pauses or ends, on login nodes and in jobs.

This package only needs the standard library.
"""
