"""Supervision of a gang by its agents: are its nodes healthy before ranks start, is a node lost, do its ranks hang?

    supervisor   what the supervisors of all agents do
    node_0       the supervisor on node 0, which decides about the gang
    other_node   the supervisor on another node, which obeys node 0
    peers        the connections of the agents to node 0, which waits until all have connected
    health       health checks of a node before its ranks start
    hang         detection of a hang, by node 0, from the heartbeats of all ranks

Time limits do not count the time for which an agent was suspended (hpc_det.node.suspension).
"""
