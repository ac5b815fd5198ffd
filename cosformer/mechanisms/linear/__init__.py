"""cosFormer and the linear family: sums over keys instead of a matrix of pairs."""
