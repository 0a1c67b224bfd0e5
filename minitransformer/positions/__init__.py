"""Where a token stands: added to it, turned into it, or added to the scores."""
