"""Samples to a batch: the walk over them, collation, items of unequal length."""
