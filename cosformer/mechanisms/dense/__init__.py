"""Softmax itself, matrices of low rank, and matrices that are learned."""
