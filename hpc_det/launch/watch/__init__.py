"""Whether a gang is well: its nodes are there, and well before ranks start, and its ranks go on stepping.

    supervisor         each node's part of that, kept by its agent
    peers              the agents' lines to node 0, which waits until all have come
    health             what a node is asked before its ranks start
    heartbeat_server   an agent asks its ranks, and passes on what they answer (hpc_det.node.heartbeat)
    hang               node 0 has all ranks asked again and again, and finds out when they hang

Time limits do not count the time in which an agent was suspended (hpc_det.node.suspension).
"""
