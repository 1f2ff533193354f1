"""Strategies: how a model trains on one device, on many (DDP), and sharded."""
