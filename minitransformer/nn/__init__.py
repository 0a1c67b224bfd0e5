"""The parts with parameters: a pure pair of functions each, and a thin class that owns arrays."""
