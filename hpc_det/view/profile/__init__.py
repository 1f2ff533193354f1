"""Where the time of a trial goes, and what to do about it, from what was measured while it trained.

timings     what the time of each rank went into
system      how each node was used
measured    both, with what validations and saves took
verdict     the rule: from these numbers to what training waits for
conditions  what it trained with, as far as advice depends on it
words       a verdict in a sentence, and notes on the numbers
advice      what to try, and which setting does it
record      all of it as plain data
"""
