"""How many examples hypothesis draws, the same ones in every run."""

from hypothesis import settings

PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)
FEW = settings(PROPERTY, max_examples=12)
