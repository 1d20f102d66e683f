"""Plain torch versions of all operations that have a kernel. Engines without a GPU run them, and tests compare the
kernels with them. Nothing here needs Triton."""
