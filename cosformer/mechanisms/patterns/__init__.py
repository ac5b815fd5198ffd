"""Softmax over some pairs: windows, strides, blocks, tokens that hash alike."""
