"""Time and memory of ops and models, as rows."""

from cosformer.bench.candidates import CANDIDATES, forward
from cosformer.bench.checks import Check, against_formula, stream_against_full_pass
from cosformer.bench.generation import held_bytes, state_after
from cosformer.bench.inputs import draw_inputs
from cosformer.bench.looking import look, reach_rows
from cosformer.bench.timing import busy, median_times, threads
from cosformer.bench.training import Steps

__all__ = [
    "CANDIDATES",
    "Check",
    "Steps",
    "against_formula",
    "busy",
    "draw_inputs",
    "forward",
    "held_bytes",
    "look",
    "median_times",
    "reach_rows",
    "state_after",
    "stream_against_full_pass",
    "threads",
]
