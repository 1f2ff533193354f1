"""What processes on the nodes share, standard library only: signals, network, rendezvous, one authenticated line."""
