"""Softmax itself, matrices of low rank, and matrices that are learned."""

from cosformer.mechanisms.dense.linformer import Linformer as Linformer
from cosformer.mechanisms.dense.nystromformer import Nystromformer as Nystromformer
from cosformer.mechanisms.dense.one_vs_each import OneVsEach as OneVsEach
from cosformer.mechanisms.dense.softmax import Softmax as Softmax
from cosformer.mechanisms.dense.synthesizer import SynthesizerDense as SynthesizerDense
from cosformer.mechanisms.dense.synthesizer import SynthesizerFactorised as SynthesizerFactorised
from cosformer.mechanisms.dense.synthesizer import SynthesizerRandom as SynthesizerRandom
