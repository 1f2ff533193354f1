"""Searchers, which decide what trials train next, and the journal that the workers of a search share."""
