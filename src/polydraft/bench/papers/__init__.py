"""Published tables and figures, to be measured again with one's own models."""

from polydraft.bench.papers.dsbd import DSBD
from polydraft.bench.papers.improved import IMPROVED
from polydraft.bench.papers.mcsd import MCSD
from polydraft.bench.papers.optimal import OPTIMAL
from polydraft.bench.papers.paper import PAPERS, Comparison, Paper
from polydraft.bench.papers.self_draft import SELF_DRAFT

__all__ = ["DSBD", "IMPROVED", "MCSD", "OPTIMAL", "PAPERS", "SELF_DRAFT", "Comparison", "Paper"]
