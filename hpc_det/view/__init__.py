"""State, history, metrics and profile of experiments, from their files and, where these leave a state open, from the
scheduler.

Two modules also write: `experiments` keeps an index of finished and paused experiments, and `interrupted` settles
submissions that were killed.
"""
