"""One process of the gang.

nursery            the process that ranks are forked from; process: what is forked
worker             does what the driver asks; runner trains, over data, and state is what is saved of it
store, broadcast   how ranks meet
train_loop         what functions of `fit` may call
"""
