"""The same by CUDA C++ for Hopper GPUs."""
