"""Skipping work, not only hiding it: which tiles exist, and attention over those alone."""
