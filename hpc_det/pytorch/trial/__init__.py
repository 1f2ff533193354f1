"""The classes that users write and call: PyTorchTrial, its context, callbacks and metric reducers."""
