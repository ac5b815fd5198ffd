"""Arguments become one checked value: positions, weights, decays, feature map and rule."""
