"""Time and memory of ops and models, as rows."""

from cosformer.bench.candidates import CANDIDATES
from cosformer.bench.cells import Case, Cell, Setup
from cosformer.bench.checks import Check, against_formula, stream_against_full_pass
from cosformer.bench.generation import held_bytes, state_after
from cosformer.bench.looking import look, reach_rows
from cosformer.bench.timing import busy, median_times, threads
from cosformer.bench.training import Steps

__all__ = [
    "CANDIDATES",
    "Case",
    "Cell",
    "Check",
    "Setup",
    "Steps",
    "against_formula",
    "busy",
    "held_bytes",
    "look",
    "median_times",
    "reach_rows",
    "state_after",
    "stream_against_full_pass",
    "threads",
]
