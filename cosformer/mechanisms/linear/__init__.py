"""cosFormer and the linear family: sums over keys instead of a matrix of pairs."""

from cosformer.mechanisms.linear.based import Based as Based
from cosformer.mechanisms.linear.cosformer import Cosformer as Cosformer
from cosformer.mechanisms.linear.decay import GatedLinear as GatedLinear
from cosformer.mechanisms.linear.decay import Retention as Retention
from cosformer.mechanisms.linear.decay import log_gate as log_gate
from cosformer.mechanisms.linear.delta import Delta as Delta
from cosformer.mechanisms.linear.delta import GatedDelta as GatedDelta
from cosformer.mechanisms.linear.elementwise import Identity as Identity
from cosformer.mechanisms.linear.elementwise import LeakyRelu as LeakyRelu
from cosformer.mechanisms.linear.elementwise import Linear as Linear
from cosformer.mechanisms.linear.elementwise import Relu as Relu
from cosformer.mechanisms.linear.elementwise import TransNormer as TransNormer
from cosformer.mechanisms.linear.family import LinearMechanism as LinearMechanism
from cosformer.mechanisms.linear.multiscale import CosformerGated as CosformerGated
from cosformer.mechanisms.linear.multiscale import CosformerMultiscale as CosformerMultiscale
from cosformer.mechanisms.linear.performer import Performer as Performer
from cosformer.mechanisms.linear.projected import Hedgehog as Hedgehog
from cosformer.mechanisms.linear.projected import Rfa as Rfa
from cosformer.mechanisms.linear.projected import RfaArccos as RfaArccos
from cosformer.mechanisms.linear.projected import RfaGated as RfaGated
from cosformer.mechanisms.linear.rope import RopeLinear as RopeLinear
from cosformer.mechanisms.linear.rope import check_rotary as check_rotary
from cosformer.mechanisms.linear.spe import SinePositions as SinePositions
from cosformer.mechanisms.linear.spe import Spe as Spe
