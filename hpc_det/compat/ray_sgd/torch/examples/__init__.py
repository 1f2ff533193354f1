"""`ray.util.sgd.torch.examples`: of its modules, users' programs import train_example."""
