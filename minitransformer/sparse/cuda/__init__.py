"""Block-sparse attention in CUDA, written in Python: kernels, their launch, and a simulator."""
