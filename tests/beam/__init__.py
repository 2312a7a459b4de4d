"""Beams: exact in law, identical where they are deterministic."""
