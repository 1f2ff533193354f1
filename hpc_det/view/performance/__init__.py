"""What limits a training, and what to do about it, by a trial's profile or by short trainings that are compared.

timings          what the time of each rank went into
system           how each node was used
measured         all that was measured of a trial, and under which conditions it trained
limits           the rule: from shares of the time to what limits the training
advice           the table of advice: what to try against each limit, and which setting does it
profile          measurements, limits and advice of a trial as plain data
short_trainings  trainings that differ in one thing each, and their throughput
findings         what these show, with the advice
"""
