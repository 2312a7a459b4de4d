"""The laboratory: benchmarks, the papers' experiments, analyses and theory. The product never imports it."""
