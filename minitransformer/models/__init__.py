"""Whole networks, put together from the parts in `nn`."""
