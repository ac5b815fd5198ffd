"""cosFormer and the linear family: sums over keys instead of a matrix of pairs."""

from cosformer.mechanisms.linear.based import Based
from cosformer.mechanisms.linear.cosformer import Cosformer
from cosformer.mechanisms.linear.decay import GatedLinear, Retention, log_gate
from cosformer.mechanisms.linear.delta import Delta, GatedDelta
from cosformer.mechanisms.linear.elementwise import Identity, LeakyRelu, Linear, Relu, TransNormer
from cosformer.mechanisms.linear.family import LinearMechanism
from cosformer.mechanisms.linear.multiscale import CosformerGated, CosformerMultiscale
from cosformer.mechanisms.linear.performer import Performer
from cosformer.mechanisms.linear.projected import Hedgehog, Rfa, RfaArccos, RfaGated
from cosformer.mechanisms.linear.rope import RopeLinear, check_rotary
from cosformer.mechanisms.linear.spe import SinePositions, Spe
