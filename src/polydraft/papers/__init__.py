"""The papers this package implements: what each claims, where its algorithms live, its experiments and its lossy rules.

`polydraft bench --reproduce NAME` measures a paper's tables and figures again; docs/papers has a page on each.
The experiments name methods and read results, so that they need no benchmark; the lossy rules are drafters like any other,
found by the name behind `--lossy`.
"""

from polydraft.papers.dsbd import DSBD
from polydraft.papers.improved import IMPROVED
from polydraft.papers.mcsd import MCSD
from polydraft.papers.optimal import OPTIMAL
from polydraft.papers.paper import FILE, PAPERS, Comparison, Paper, folder_name, write_reproduction
from polydraft.papers.self_draft import SELF_DRAFT
from polydraft.papers.target_init import TargetInit

__all__ = [
    "DSBD",
    "FILE",
    "IMPROVED",
    "MCSD",
    "OPTIMAL",
    "PAPERS",
    "SELF_DRAFT",
    "Comparison",
    "Paper",
    "TargetInit",
    "folder_name",
    "write_reproduction",
]
