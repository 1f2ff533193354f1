"""Kills of processes at moments that facts choose: a function of the product is called, or returns, in some process.

orders: what is to be killed, and when. moments: in all processes of a job, they carry the orders out. victims: who is
who among the processes. plans: random orders, and what is to become of the training then.
"""
