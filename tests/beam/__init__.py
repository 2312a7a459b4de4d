"""Beams: exact in distribution, identical where they are deterministic."""
