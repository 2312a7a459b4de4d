"""The papers that this package implements: which benchmarks to run for their tables and figures.

`polydraft bench --reproduce NAME` measures a paper again. docs/papers has a page on each: its claims, where each piece is
implemented, which test proves it, and our measurements. The modules here only name methods and read results, so they do not
import the benchmarks. The papers' lossy rules are in `polydraft.papers`.
"""

from polydraft.lab.papers.dsbd import DSBD
from polydraft.lab.papers.improved import IMPROVED
from polydraft.lab.papers.mcsd import MCSD
from polydraft.lab.papers.optimal import OPTIMAL
from polydraft.lab.papers.pages import FILE
from polydraft.lab.papers.paper import PAPERS, Comparison, DistributionRun, Paper, Results, Run
from polydraft.lab.papers.self_draft import SELF_DRAFT

__all__ = [
    "DSBD",
    "FILE",
    "IMPROVED",
    "MCSD",
    "OPTIMAL",
    "PAPERS",
    "SELF_DRAFT",
    "Comparison",
    "DistributionRun",
    "Paper",
    "Results",
    "Run",
]
