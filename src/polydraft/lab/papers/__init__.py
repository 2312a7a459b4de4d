"""The papers that this package implements: which benchmarks to run for their tables and figures.

`polydraft bench --reproduce NAME` measures a paper again. docs/papers has a page on each: its claims, where each piece is
implemented, which test proves it, and our measurements. The modules here only name methods and read results, so they do not
import the benchmarks. The papers' lossy rules are in `polydraft.papers`.
"""

from polydraft.lab.papers import dsbd, improved, mcsd, optimal, self_draft  # noqa: F401  (they register the papers)
from polydraft.lab.papers.pages import FILE
from polydraft.lab.papers.paper import PAPERS, Comparison, DistributionRun, Paper, Results, Run

__all__ = ["FILE", "PAPERS", "Comparison", "DistributionRun", "Paper", "Results", "Run"]
