"""N-grams looked up on the device: tries of a fixed size, built inside the round so that nothing waits for the host.

Text and corpus make their proposals as tensors (`polydraft.ngrams.tables`); the likeliest paths of all become one trie per row.
They depend on the text alone, and are verified like the host's tries.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from polydraft.devices import assign, brought, captures
from polydraft.draft.builder import Builder
from polydraft.draft.gram_options import Sizes
from polydraft.draft.source import Source
from polydraft.draft.trie import WIDTH, check_node_walk
from polydraft.models.language_model import round_up
from polydraft.ngrams import GramCache
from polydraft.ngrams.lookup import MOST_COPIES
from polydraft.ngrams.tables import LONGEST, CorpusTables, Paths, Texts, powers
from polydraft.rows import ByRow
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify import Naive, NodeWalk, Verdict, Walk

_CORPUS_NODES = 32
"""Most candidates that a corpus has at one place: about ten bytes each, for every n-gram of the corpus."""
_SPARE = 3
"""How many times more candidates than wanted are checked for duplicates."""


def on_device(caches: Sequence[GramCache], sizes: Sizes, device: torch.device) -> bool:
    """Whether all these caches can be looked up on the device, a GPU; on a CPU, the host's own structures are faster."""
    fits = sizes.depth <= LONGEST and all(cache.has_tensors and cache.longest_match <= LONGEST for cache in caches)
    return captures(device) and not sizes.riders.branches and fits


class DeviceGramSource(Source):
    """The texts of one batch, on the device."""

    ROW_STATE = ("sources_BN",)
    FORGETS = True

    def __init__(self, batch_size: int, match: int, order: int, device: torch.device) -> None:
        self.texts = Texts(batch_size, match, order, MOST_COPIES, device)
        self._room = 1
        self.credited: list[Sequence[int]] = []
        """Which cache proposed each token of each row's accepted path."""
        self.nodes, self.sources_BN = 1, torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        """Nodes of a trie; and which cache proposed each node of the last one, with one entry more to write to."""

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Record how many tokens a round may add."""
        self._room = depth + 1

    def row_parts(self) -> Iterable[ByRow]:
        """Return the texts."""
        return (self.texts,)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Write new texts over the old ones."""
        own = self.texts
        # A round launched ahead may add to a text that has ended.
        wanted = round_up(own.start + longest + 4 * self._room)
        if wanted > own.tokens_BL.shape[1]:
            missing = wanted - own.tokens_BL.shape[1]
            own.tokens_BL = torch.nn.functional.pad(own.tokens_BL, (0, missing), value=NO_TOKEN)
        for row in rows:
            tokens_L = torch.full((own.tokens_BL.shape[1],), NO_TOKEN)
            tokens_L[own.start : own.start + len(texts[row])] = torch.tensor(list(texts[row]))
            own.tokens_BL[row].copy_(brought(tokens_L, own.tokens_BL.device))
            own.lengths_B[row].fill_(len(texts[row]))

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> Tensor:
        """Append the round's tokens to the texts; report who proposed them."""
        self.texts.append(verdict.tokens_BD, keep_B)
        # If there is a drawn tree, its nodes come first; their sources do not matter here.
        before = features_BNF.shape[1] - self.nodes
        return self.sources_BN.gather(1, (verdict.path_BD[:, 1:] - before).clamp(min=0))

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Store who proposed what."""
        self.credited = list(reports)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Cut the texts to these lengths."""
        assign(self.texts.lengths_B, [len(text) for text in texts])


class DeviceTrieBuilder(Builder):
    """Merge what the caches propose without looking at values.

    Every trie has the same number of nodes: in a capture, leaving some out would save nothing.

    Parameters
    ----------
    caches : sequence of GramCache
        Caches that have tensors.
    sizes : Sizes
    batch_size : int
    device : torch.device
    name : str
        Name of the drafter.
    """

    elastic = True
    num_uniforms = 0
    scheme = Naive()
    """The emitted token is the target's own draw, whatever was proposed."""

    def __init__(self, caches: Sequence[GramCache], sizes: Sizes, batch_size: int, device: torch.device, name: str) -> None:
        self._names, self._name, self._nodes, self.depth = [cache.name for cache in caches], name, sizes.nodes, sizes.depth
        self.num_nodes = 1 + sizes.nodes
        matched = [(cache.longest_match, number) for number, cache in enumerate(caches) if cache.longest_match]
        self._text = max(matched)[1] if matched else None
        """The cache that copies from the text; one is enough."""
        self._corpora: list[tuple[int, CorpusTables]] = []
        for number, cache in enumerate(caches):
            tables = cache.tables(min(sizes.nodes, _CORPUS_NODES), sizes.depth, device)
            if tables is not None:
                self._corpora.append((number, tables))
        match, order = max(matched, default=(0, 0))[0], max((tables.order for _, tables in self._corpora), default=0)
        self.source: DeviceGramSource = DeviceGramSource(batch_size, match, order, device)
        self.source.nodes = self.num_nodes
        self.source.sources_BN = torch.zeros(batch_size, self.num_nodes + 1, dtype=torch.long, device=device)
        self._powers = powers(device)
        count = _SPARE * sizes.nodes
        self._earlier_RR = torch.ones(count, count, dtype=torch.bool, device=device).tril(-1)
        self._itself_NN = torch.eye(self.num_nodes, device=device)
        self._empty_N3 = torch.zeros(self.num_nodes + 1, 3, dtype=torch.long, device=device)
        self._empty_N3[:, 0] = NO_TOKEN

    @property
    def kind(self) -> Hashable:
        """The allocated length of the texts, which a capture reads in place."""
        return self.source.texts.tokens_BL.shape[1]

    def resolve_walk(self, name: str) -> Walk:
        """Return the node walk, the only one that can verify n-grams."""
        check_node_walk(self._name, name)
        return NodeWalk()

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Look up candidates and merge them."""
        return self.merged(self.candidates(), tail_B2[:, 1])

    def candidates(self) -> list[tuple[int, Paths]]:
        """Return what each cache proposes; a corpus is looked up at the text's end, and after each token of a copy."""
        texts, found = self.source.texts, list[tuple[int, Paths]]()
        root_B1 = torch.zeros_like(texts.lengths_B[:, None])
        stems, tokens_BPD = Paths(root_B1[..., None].expand(-1, -1, 3), root_B1 + 1.0), None
        if self._text is not None:
            copies = texts.copies(self.depth)
            found.append((self._text, copies))
            tokens_BPD = copies.numbers_BX3[..., 0].reshape(len(root_B1), -1, self.depth)
            stems = _joined([stems, copies])
        for number, tables in self._corpora:
            windows_BXO = texts.tail(tables.order)[:, None]
            if tokens_BPD is not None:
                tail_BPO = windows_BXO.expand(-1, tokens_BPD.shape[1], -1)
                further_BXO = torch.cat([tail_BPO, tokens_BPD], 2).unfold(2, tables.order, 1)[:, :, 1:].flatten(1, 2)
                windows_BXO = torch.cat([windows_BXO, further_BXO], 1)
            found.append((number, tables.paths(windows_BXO, stems)))
        return found

    def merged(self, found: Sequence[tuple[int, Paths]], root_B: Tensor) -> DraftTree:
        """Make a trie of the likeliest paths of each row."""
        paths = _joined([part for _, part in found])
        chances_BX = torch.where(paths.numbers_BX3[..., 1] <= self.depth, paths.chances_BX, 0)
        chances_BR, best_BR = chances_BX.topk(min(len(self._earlier_RR), chances_BX.shape[1]))
        best_BR3 = best_BR[..., None].expand(-1, -1, 3)
        numbers_BR3, count = paths.numbers_BX3.gather(1, best_BR3), best_BR.shape[1]
        marks_BR = numbers_BR3[..., 2]
        double_BR = ((marks_BR[:, :, None] == marks_BR[:, None]) & self._earlier_RR[:count, :count]).any(-1)
        kept_BR = (chances_BR > 0) & ~double_BR
        # In order of falling chance, so that parents precede children; candidates without room go behind the last node.
        nodes, batch_size = self.num_nodes, len(root_B)
        node_BR = torch.where(kept_BR, kept_BR.cumsum(-1), nodes).clamp(max=nodes)
        numbers_BN3 = self._empty_N3.repeat(batch_size, 1, 1).scatter_(1, node_BR[..., None].expand_as(best_BR3), numbers_BR3)
        self._credit(found, node_BR, best_BR)
        tokens_BN, depths_BN, marks_BN = numbers_BN3[:, :nodes].unbind(-1)
        before_BN = marks_BN - (tokens_BN + 1) * self._powers[depths_BN]
        earlier_NN = self._earlier_RR[:nodes, :nodes]
        above_BNN = (before_BN[:, :, None] == marks_BN[:, None]) & earlier_NN
        listed_BN = above_BNN.any(-1) & (tokens_BN != NO_TOKEN)
        # Nodes without a parent go below the root as well.
        parents_BN = above_BNN.to(torch.uint8).argmax(-1)
        rank_BN = ((parents_BN[:, :, None] == parents_BN[:, None]) & listed_BN[:, None] & earlier_NN).sum(-1)
        slot_BN = torch.where(listed_BN & (rank_BN < WIDTH), parents_BN * WIDTH + rank_BN, nodes * WIDTH)
        table_BX = torch.zeros_like(slot_BN[:, :1]).repeat(1, nodes * WIDTH + 1)
        table_BX.scatter_(1, slot_BN, torch.arange(nodes, device=slot_BN.device).expand_as(slot_BN))
        reach_BNN = self._itself_NN[parents_BN] + self._itself_NN
        for _ in range((self.depth - 1).bit_length()):
            reach_BNN = reach_BNN @ reach_BNN
        ancestors_BNN = reach_BNN > 0
        tokens_BN = torch.cat([root_B[:, None], tokens_BN[:, 1:]], 1)
        table_BNK = table_BX[:, :-1].view(batch_size, nodes, WIDTH)
        return DraftTree(tokens_BN, ancestors_BNN.sum(-1) - 1, ancestors_BNN, table_BNK, self.depth)

    def _credit(self, found: Sequence[tuple[int, Paths]], node_BR: Tensor, best_BR: Tensor) -> None:
        """Record who proposed each node."""
        source_BR, start = torch.full_like(best_BR, found[0][0]), 0
        for (_, before), (number, _) in pairwise(found):
            start += before.chances_BX.shape[1]
            source_BR = torch.where(best_BR >= start, number, source_BR)
        self.source.sources_BN.scatter_(1, node_BR, source_BR)

    def credits(self, row: int, tokens: Sequence[int]) -> Sequence[str]:
        """Name the cache that proposed each token."""
        return [self._names[number] for number in self.source.credited[row][: len(tokens)]]


def _joined(parts: Sequence[Paths]) -> Paths:
    """Concatenate candidates."""
    if len(parts) == 1:
        return parts[0]
    return Paths(torch.cat([part.numbers_BX3 for part in parts], 1), torch.cat([part.chances_BX for part in parts], 1))
