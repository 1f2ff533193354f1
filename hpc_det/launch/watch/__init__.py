"""Whether a gang is well: its nodes are there, and well before ranks start, and its ranks go on stepping.

Each node's agent keeps a vigil (`vigil`). It holds a line to node 0 until it says goodbye (`peers`), and node 0 waits
for all of them (`arrivals`). Before ranks start it examines its node (`health`, `gpus`). Each rank has a heart, which
answers whatever the rank is doing (`heartbeat`); its agent asks all of them (`hearts`) and passes on what they say.
Node 0 has them asked again and again (`rounds`), and finds out when they hang (`hang`, arithmetic alone). Time limits
do not count the time in which an agent was suspended (hpc_det.node.suspension).
"""
