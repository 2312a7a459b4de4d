"""Acceptance of schemes against the optimum, on probabilities of two real models along the target's own text."""
