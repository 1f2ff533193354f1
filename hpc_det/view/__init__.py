"""State, history, metrics and profile of experiments, from their files and, if these do not settle a state, the
scheduler.

`experiments` keeps an index of finished and paused ones, and `interrupted` settles submissions that were killed; all
other modules only read.
"""
