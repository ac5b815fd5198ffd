"""Softmax itself, matrices of low rank, and matrices that are learned."""

from cosformer.mechanisms.dense.linformer import Linformer
from cosformer.mechanisms.dense.nystromformer import Nystromformer
from cosformer.mechanisms.dense.one_vs_each import OneVsEach
from cosformer.mechanisms.dense.softmax import Softmax
from cosformer.mechanisms.dense.synthesizer import (
    SynthesizerDense,
    SynthesizerFactorised,
    SynthesizerRandom,
)
