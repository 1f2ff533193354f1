"""Whether a gang is well: node by node before its ranks start, and then whether they go on stepping.

Each node's agent keeps a vigil (`vigil`). Before ranks start it examines its node (`health`, `gpus`), and tells node 0
over a line of its own (`peers`). Each rank has a heart, which answers whatever the rank is doing (`heartbeat`); its
agent asks all of them (`hearts`) and passes on what they say. Node 0 has them asked again and again (`rounds`), and
finds out when they hang (`hang`, arithmetic alone).
"""
