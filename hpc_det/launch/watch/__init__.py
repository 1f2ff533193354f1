"""Supervision of a gang: its nodes run and are healthy before ranks start, and its ranks make progress.

    supervisor   the part of each node's agent
    peers        the connections of the agents to node 0, which waits until all have connected
    health       health checks of a node before its ranks start
    hang         progress of the ranks, from their heartbeats; node 0 detects a hang

Time limits do not count the time for which an agent was suspended (hpc_det.node.suspension).
"""
