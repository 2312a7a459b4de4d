"""How likely a proposed token is the target's next one, by what speaks for it.

Tables of hit rates, counted over text that SmolLM2 wrote itself at temperature 0: up to 80 tokens after each of 36 prompts of
mathematics, code, translations and summaries, none of which is among those that figures are reported of, and smoothed by hand.
They say which candidates a pass is spent on; the text that comes out has the target's law whatever stands here.
"""

_BY_MATCH = (
    (0.25, 0.06, 0.05, 0.03),
    (0.56, 0.08, 0.05, 0.05),
    (0.72, 0.14, 0.10, 0.05),
    (0.80, 0.14, 0.10, 0.05),
    (0.83, 0.14, 0.10, 0.05),
    (0.86, 0.14, 0.10, 0.05),
    (0.88, 0.14, 0.10, 0.05),
    (0.94, 0.14, 0.10, 0.05),
)
"""Of what followed in the text before: a row for 1, 2, 3, 4, 5, up to 7, up to 11 and more tokens that matched, by rank, the
last for all further ones."""
_MATCH_ROWS = (0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7)
_BY_SHARE = (
    ((0.05, 0.09, 0.16, 0.19, 0.20, 0.21, 0.27, 0.35, 0.40, 0.50), (0.02, 0.08, 0.10), (0.015, 0.03)),
    ((0.04, 0.07, 0.18, 0.24, 0.38, 0.40, 0.45, 0.58, 0.65, 0.75), (0.05, 0.12, 0.16, 0.22), (0.03, 0.06, 0.12)),
    ((0.11, 0.13, 0.28, 0.35, 0.40, 0.55, 0.60, 0.67, 0.85, 0.92), (0.05, 0.12, 0.25, 0.30), (0.05, 0.07, 0.20)),
)
"""Of what a corpus counted: for 1, 2 and more tokens that matched, by rank (0, 1, more) and by tenths of the places after these
tokens that have it next."""


def match_chance(size: int, rank: int) -> float:
    """Return the chance of what followed the text's last `size` tokens before, when `rank` others are better."""
    row = _BY_MATCH[_MATCH_ROWS[size] if size < len(_MATCH_ROWS) else -1]
    return row[rank] if rank < len(row) else row[-1]


def share_chance(size: int, rank: int, share: float) -> float:
    """Return the chance of what follows `size` tokens in a `share` of the places where a corpus has them."""
    ranks = _BY_SHARE[min(size, len(_BY_SHARE)) - 1]
    shares = ranks[min(rank, len(ranks) - 1)]
    return shares[min(int(10 * share), len(shares) - 1)]
