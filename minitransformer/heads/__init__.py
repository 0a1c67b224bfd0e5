"""Attention heads: how they are doing, what each is worth, which can go."""
