"""Optimisers, learning rates, settings, the loop, and runs on disk that survive being killed."""
