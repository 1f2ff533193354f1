"""Code for the processes on compute nodes, standard library only: signals, network, rendezvous, files, connections."""
