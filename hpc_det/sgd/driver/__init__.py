"""In the user's program: who is asked, and who goes on where a gang is lost.

trainer, fitting   TorchTrainer and fit: what a user calls
opening            from their arguments to a gang that stands
nodes              agents that have come; gang: ranks that are formed over them, and watched
elastic            another gang where one is lost; failures: why, and how the driver leaves
calls              what is asked of all ranks, and what a later program need not ask again
"""
