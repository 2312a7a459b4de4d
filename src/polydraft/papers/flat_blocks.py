"""Self-Draft's verification as its paper describes it, for ablations: above temperature 0 it changes the distribution.

References
----------
.. [1] Gao et al. 2025, Multi-Branch Self-Drafting for LLM Inference Acceleration, "Candidate drafts verification".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.draft.trie import TokenTrie, check_node_walk
from polydraft.draft.trie_builder import LOSSY_TRIES, TrieBuilder
from polydraft.ngrams import ContinuationMemory, GramMemory, Match
from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.trees import DraftTree
from polydraft.verify import Fault, Scheme, Verdict, Walk
from polydraft.verify.walk import TargetDistribution, fault_of


@LOSSY_TRIES.register("flat-blocks")
class FlatBlocksBuilder(TrieBuilder):
    """Builds separate chains that share no nodes, those after the longest prefixes first."""

    obstacle = "the walk over flat blocks, a lossy rule kept for comparison, looks at values on the host"

    def resolve_walk(self, name: str) -> Walk:
        """Return the walk that keeps the longest chain; refuse any name but ``node``, as other tries do."""
        check_node_walk(self._name, name)
        return FlatBlocksWalk(1 + self._options.most_nodes)

    def trie(self, memories: Sequence[GramMemory], root: int) -> TokenTrie:
        """Return the continuations of the longest prefixes."""
        trie, found = TokenTrie(root), list[tuple[Match, str]]()
        for name, memory in zip(self.source.names, memories, strict=True):
            assert isinstance(memory, ContinuationMemory), name
            found += [(match, name) for match in memory.matches(self._options.candidates, self.depth)]
        found.sort(key=lambda pair: -pair[0].prefix)  # stable: of equal prefixes the first cache's come first
        for match, name in found:
            node = 0
            for token in match.tokens[: 1 + self._limits.nodes - len(trie)]:
                node = trie.child(node, token, name)
        return trie


class FlatBlocksWalk(Walk):
    """Draws a token after every node independently, and keeps the longest candidate that agrees with its own draws.

    Lossy: candidates with a common beginning draw several times at the same position, and keeping the longest one favours
    tokens with long continuations. With one draw per node of a trie (`NodeWalk`), the text keeps its distribution. At
    temperature 0 all draws agree, so both walks give the same text. Not registered, because every registered walk is lossless.
    Trees have at most `num_nodes` nodes, the root included.
    """

    name = "flat-blocks"

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Return False: only `FlatBlocksBuilder` uses this walk."""
        return False

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """One per node."""
        return self._num_nodes

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        """Draw at every node, then compare each candidate with the draws."""
        nodes_BN, device = draft.tokens_BN, draft.tokens_BN.device
        batch_size, nodes = nodes_BN.shape[0], nodes_BN.shape[1] - draft.riders
        rows_B = torch.arange(batch_size, device=device)
        parents_BN, named_BN = draft.parents(), torch.zeros_like(nodes_BN, dtype=torch.bool)
        named_BN.scatter_(1, draft.child_table_BNK.flatten(1), True)
        drawn_BN = torch.full((batch_size, nodes), NO_TOKEN, device=device)
        agrees_BN = torch.zeros(batch_size, nodes, dtype=torch.bool, device=device)
        agrees_BN[:, 0] = True
        path_BND = torch.zeros(batch_size, nodes, draft.depth + 1, dtype=torch.long, device=device)
        tokens_BND = torch.full_like(path_BND, NO_TOKEN)
        fault_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        for node in range(nodes):  # parents come before their children
            parent_B, depth_B = parents_BN[:, node], draft.depths_BN[:, node]
            if node:
                agrees_BN[:, node] = (
                    named_BN[:, node] & agrees_BN[rows_B, parent_B] & (drawn_BN[rows_B, parent_B] == nodes_BN[:, node])
                )
                path_BND[:, node] = path_BND[rows_B, parent_B]
                tokens_BND[:, node] = tokens_BND[rows_B, parent_B]
                # Entries beyond the path repeat its last node.
                beyond_BD = torch.arange(draft.depth + 1, device=device) >= depth_B[:, None]
                path_BND[:, node] = torch.where(beyond_BD, node, path_BND[:, node])
            distribution_BV = _distribution(target_distribution, node, tokens_BND[:, node], depth_B)
            drawn_BN[:, node] = draw_one(distribution_BV, uniforms_BU[:, node])
            tokens_BND[rows_B, node, depth_B] = drawn_BN[:, node]
            broken_B = fault_of(distribution_BV, distribution_BV)
            fault_B = torch.where(agrees_BN[:, node] & (fault_B == Fault.NONE), broken_B, fault_B)
        length_BN = torch.where(agrees_BN, draft.depths_BN[:, :nodes], -1)
        best_B = length_BN.argmax(1)
        accepted_B = draft.depths_BN[rows_B, best_B]
        offers_B = (draft.children(best_B)[1] != NO_TOKEN).any(-1)
        return Verdict(path_BND[rows_B, best_B], accepted_B, tokens_BND[rows_B, best_B], accepted_B + offers_B, fault_B)


def _distribution(target_distribution: TargetDistribution, node: int, tokens_BD: Tensor, depth_B: Tensor) -> Tensor:
    """Return the target's distribution at one node of every row; its depth may differ from row to row."""
    distribution_BV: Tensor | None = None
    for depth in range(int(depth_B.max()) + 1):
        node_B = torch.full_like(depth_B, node)
        at_BV = target_distribution(node_B, tokens_BD[:, :depth])
        distribution_BV = at_BV if distribution_BV is None else torch.where((depth_B == depth)[:, None], at_BV, distribution_BV)
    assert distribution_BV is not None
    return distribution_BV
