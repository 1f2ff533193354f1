"""Kills of processes at moments that are events: a function of the product is called, or returns, in some process.

orders: the victims and moments of kills. moments: carry the orders out, in all processes of a job. victims: find
processes by kind. plans: random orders, and the permitted ends of the training.
"""
