"""Benchmarks that compare methods; docs/bench-results.md describes the files they write."""

SCHEMA = 1
"""Version of the format of `results.json`."""
BASELINE = "ar"
"""The method that speed-ups are relative to, and whose greedy texts the others must match."""
