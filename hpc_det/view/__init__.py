"""State, history, metrics and profile of experiments, from their files and, where these leave it open, the scheduler.

`experiments` keeps an index of those that rest, and `interrupted` settles submissions that were killed; all else reads.
"""
