"""The same by Triton kernels."""
