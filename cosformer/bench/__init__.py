"""Time and memory of ops and models, as rows."""
