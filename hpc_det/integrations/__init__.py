"""Adapters for other packages, each in a module that is imported only where it is used."""
