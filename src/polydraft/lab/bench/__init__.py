"""Benchmarks of methods against each other; docs/bench-results.md describes what is written."""

SCHEMA = 1
"""Version of the format of `results.json`."""
BASELINE = "ar"
"""The method that speed-ups and greedy texts are compared with."""
