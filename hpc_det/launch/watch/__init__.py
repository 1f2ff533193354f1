"""Whether a gang is well: its nodes are there, and well before ranks start, and its ranks go on stepping.

    supervisor   each node's part of that, kept by its agent
    peers        the agents' lines to node 0, which waits until all have come
    health       what a node is asked before its ranks start
    hang         an agent asks its ranks over their heartbeats; node 0 finds out when they hang

Time limits do not count the time in which an agent was suspended (hpc_det.node.suspension).
"""
