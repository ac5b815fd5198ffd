"""Attention in linear time in plain torch."""
