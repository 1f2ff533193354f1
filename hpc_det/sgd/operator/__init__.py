"""What users write, and what it is made of.

training_operator  models, data, steps; base is what of it no user overrides
creators           functions instead of methods, as RaySGD's users know them
options            keys, errors and options that users, operators and the driver share; mixed precision
meters             what is averaged and timed, and the progress bar
porting            what RaySGD's operators import
"""
