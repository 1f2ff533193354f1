"""The driver: the user's program, which sends calls to the ranks and forms a new gang when one is lost.

trainer   TorchTrainer
fitting   fit: a function of the user on every rank
opening   checks the arguments of both and starts the first gang
nodes     the node agents that are connected
gang      the ranks of one generation: forming, calling, watching and ending them
elastic   a gang that is formed again when it is lost, and restored from the newest snapshot
failures  the kinds of failures, and the exit of the driver
calls     calls to all ranks, reduced results, and the record of calls that a restarted program does not repeat
"""
