"""How much of what could be accepted is accepted, on the probabilities of two real models along the target's own text."""
