"""Compare the acceptance of schemes with the optimum, on distributions of two real models along the target's own text."""
