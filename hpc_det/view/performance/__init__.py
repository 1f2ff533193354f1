"""Limits of a training and remedies, from a trial's profile or by comparing short trainings.

timings          how each rank spent its time
system           the load of each node
measured         all measurements of a trial, and its conditions
limits           the rule: from shares of the time to the limits of the training
advice           the table of advice: remedies for each limit, and their settings
profile          measurements, limits and advice of a trial as plain data
short_trainings  trainings that differ in one setting each, and their throughput
findings         the conclusions from short trainings, with advice
"""
