"""The parts with parameters: each a pure pair of functions, and a thin class that owns the arrays."""
