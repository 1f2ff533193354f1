"""How a model trains: on one device, on many (DDP), sharded."""
