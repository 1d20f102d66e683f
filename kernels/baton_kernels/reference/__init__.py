"""Plain torch for each operation that has a kernel: what an engine runs without a GPU, and what kernels are compared
with. Nothing here needs Triton."""
