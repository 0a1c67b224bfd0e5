"""Exact attention, dense and readable."""
