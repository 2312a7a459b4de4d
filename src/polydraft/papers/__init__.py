"""What only a paper needs, out of the way of what everybody runs: each behind a flag of its own."""
