"""Calls on a Hopper GPU repeated in C++, where Python takes longer than the kernels."""
