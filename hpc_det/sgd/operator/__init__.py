"""TrainingOperator, the class that users derive from, and its parts.

training_operator  TrainingOperator: the default training and validation loops
base               BaseOperator: registration, mixed precision and properties, which users do not override
creators           operators built from creator functions, as in early RaySGD
options            keys, errors and options shared by users, operators and the driver; mixed precision
meters             weighted means, timers and the progress bar
porting            names that RaySGD operators import from ray.util.sgd.utils
"""
