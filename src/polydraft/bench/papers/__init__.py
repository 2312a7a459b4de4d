"""Published tables and figures, to be measured again with one's own models."""

from polydraft.bench.papers.dsbd import DSBD
from polydraft.bench.papers.mcsd import MCSD
from polydraft.bench.papers.optimal import OPTIMAL
from polydraft.bench.papers.paper import PAPERS, Comparison, Paper

__all__ = ["DSBD", "MCSD", "OPTIMAL", "PAPERS", "Comparison", "Paper"]
