"""Verification at temperature 0 on a CPU: C finds the tokens of all nodes, Python follows them.

A tree has a few dozen nodes, and a path only a few: Python lists take a tenth of the time of small tensors.
"""

import torch
from torch import Tensor

from polydraft.backends.native.drawing import largest_weights, readable
from polydraft.operations import implements
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify.node import follow_largest
from polydraft.verify.walk import Fault, Verdict


def _supports(draft: DraftTree, logits_BNV: Tensor) -> bool:
    return logits_BNV.is_contiguous() and readable(logits_BNV.flatten(0, 1), torch.float32)


@implements(follow_largest, "native", supports=_supports)
def _follow_largest(draft: DraftTree, logits_BNV: Tensor) -> Verdict:
    ranked = largest_weights(logits_BNV.flatten(0, 1), 1)
    if ranked is None:  # there are NaNs
        return follow_largest.reference(draft, logits_BNV)
    best_BN = ranked[1].where(ranked[0].abs() < torch.inf, NO_TOKEN).view_as(draft.tokens_BN)
    table_BNK, children_BNK = draft.all_followers()
    found = zip(best_BN.tolist(), table_BNK.tolist(), children_BNK.tolist(), strict=True)
    columns = zip(*(_followed(draft.depth, *row) for row in found), strict=True)
    return Verdict(*(torch.tensor(column) for column in columns))


def _followed(
    depth: int, best: list[int], table: list[list[int]], children: list[list[int]]
) -> tuple[list[int], int, list[int], int, int]:
    """Return one row's fields of the `Verdict`: path, number of accepted tokens, emitted tokens, offers and fault."""
    path = [0]
    while len(path) <= depth and best[path[-1]] in children[path[-1]] and best[path[-1]] != NO_TOKEN:
        path.append(table[path[-1]][children[path[-1]].index(best[path[-1]])])
    accepted, last = len(path) - 1, path[-1]
    path += [last] * (depth - accepted)
    offered = accepted + any(child != NO_TOKEN for child in children[last])
    fault = Fault.TARGET if best[last] == NO_TOKEN else Fault.NONE
    return path, accepted, [best[node] for node in path], offered, fault.value
