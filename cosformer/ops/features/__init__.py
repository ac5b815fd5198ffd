"""What several mechanisms make of q and k before attention: features of projections, rotations."""

from cosformer.ops.features.projected import PARTS as PARTS
from cosformer.ops.features.projected import projected as projected
from cosformer.ops.features.projected import top_exponents as top_exponents
from cosformer.ops.features.rotary import positions as positions
from cosformer.ops.features.rotary import rotate as rotate
from cosformer.ops.features.rotary import rotated_features as rotated_features
