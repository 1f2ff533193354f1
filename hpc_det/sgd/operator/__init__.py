"""What users write, and what it is made of.

training_operator  models, data, steps; base is what of it no user overrides
creators           functions instead of methods, as RaySGD's users know them
registered         what `register` was given; options: what a call of train or validate says of it
precision          automatic mixed precision; progress: the bar; meters, timers: what is averaged and timed
constants, errors  names that users import
porting            what RaySGD's operators import
"""
