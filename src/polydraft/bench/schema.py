"""What every part of the benchmark agrees on; docs/bench-results.md describes the rest."""

SCHEMA = 1
"""Number of the form of `results.json`."""
BASELINE = "ar"
"""The method that speed-ups and greedy texts are compared with."""
