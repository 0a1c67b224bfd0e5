"""Somebody else's function as a target that properties can judge."""
