"""What several mechanisms make of q and k before attention: features of projections, rotations."""

from cosformer.ops.features.projected import PARTS, projected, top_exponents
from cosformer.ops.features.rotary import positions, rotate, rotated_features
