"""N-grams as tensors: proposals for all rows at once inside a captured round, where the host cannot look at values.

A candidate is a *path* of tokens after the text's end. A path is identified by its *mark*, a rolling hash: the sum of
(token + 1) · base^depth modulo 2^64. The mark of a longer path is that of its prefix plus one term, and equal paths from
different sources have equal marks. If two different paths collide, a candidate is wasted.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from polydraft.ngrams.cache import match_chance, share_chance
from polydraft.ngrams.gram_trie import GramTrie, share_tenths
from polydraft.rows import ByRow
from polydraft.sampling import NO_TOKEN

_BASE = 0x9E3779B97F4A7C15
LONGEST = 64
"""Longest path or n-gram."""
MOST_WAYS = 8
"""Most tokens that the text or a corpus proposes at one place, here and on the host."""
_CHUNK = 1 << 13
"""States whose trees are grown at once, to limit memory."""
_RANKS, _SIZES = 4, 13
"""Ranks and match lengths from which on probabilities stay the same."""


@lru_cache(maxsize=8)
def powers(device: torch.device) -> Tensor:
    """Return base^0, base^1, ... as signed 64-bit integers."""
    wrapped = [pow(_BASE, number, 1 << 64) for number in range(LONGEST + 1)]
    return torch.tensor([one - (1 << 64) if one >> 63 else one for one in wrapped], device=device)


@dataclass(frozen=True, eq=False)
class Paths:
    """Candidates of a batch, X per row: each is the last token of a path after the text's end."""

    numbers_BX3: Tensor
    """Token, depth and mark of each candidate, in one tensor because every launch costs time."""
    chances_BX: Tensor
    """Probability that all tokens of the path are right; 0 for no candidate."""


class Texts(ByRow):
    """The texts of a batch, pending tokens included, searched for what followed their last tokens earlier.

    Parameters
    ----------
    batch_size : int
    match : int
        Longest match, at the text's end, to look for in the text.
    order : int
        Largest `size` of `tail`.
    count : int
        Earlier occurrences to follow: the longest matches, and among them the most recent.
    device : torch.device
    """

    ROW_STATE = ("tokens_BL", "lengths_B")
    FORGETS = True

    def __init__(self, batch_size: int, match: int, order: int, count: int, device: torch.device) -> None:
        self.start, self._match, self._count = max(match, order), match, count
        self.tokens_BL = torch.full((batch_size, self.start + count), NO_TOKEN, device=device)
        """Texts begin at `start`, after padding; entries after a text are undefined."""
        self.lengths_B = torch.ones(batch_size, dtype=torch.long, device=device)
        self._earlier_PP = torch.ones(count, count, dtype=torch.bool, device=device).tril(-1)[:, :, None]
        chances = [[match_chance(size, rank) for rank in range(_RANKS)] for size in range(_SIZES)]
        self._chances_X = torch.tensor(chances, device=device).flatten()

    def tail(self, size: int) -> Tensor:
        """Return the last tokens of each text, padded with `NO_TOKEN`."""
        assert size <= self.start
        place_BX = self.lengths_B[:, None] + torch.arange(self.start - size, self.start, device=self.lengths_B.device)
        return self.tokens_BL.gather(1, place_BX)

    def append(self, tokens_BD: Tensor, count_B: Tensor) -> None:
        """Append the first `count_B` of these tokens to each text."""
        place_BD = self.start + self.lengths_B[:, None] + torch.arange(tokens_BD.shape[1], device=tokens_BD.device)
        self.tokens_BL.scatter_(1, place_BD.clamp(max=self.tokens_BL.shape[1] - 1), tokens_BD)
        self.lengths_B += count_B

    def copies(self, depth: int) -> Paths:
        """Find the text's last tokens earlier in the text, and return what followed; at the text's end, a copy starts over."""
        device = self.lengths_B.device
        # Window j holds the tokens before place j of the text.
        windows_BJK = self.tokens_BL[:, self.start - self._match :].unfold(1, self._match, 1)
        places = windows_BJK.shape[1]
        # Selecting among 32-bit integers takes half the time.
        place_J, number_K = (torch.arange(size, dtype=torch.int32, device=device) for size in (places, self._match))
        same_BJK = windows_BJK == self.tail(self._match)[:, None]
        size_BJ = self._match - 1 - torch.where(same_BJK, -1, number_K).amax(-1)
        usable_BJ = (size_BJ > 0) & (place_J < self.lengths_B[:, None])
        best_BP1 = torch.where(usable_BJ, size_BJ * places + place_J, 0).topk(self._count).values[..., None].long()
        size_BP1, place_BP1 = best_BP1 // places, best_BP1 % places
        along_D = torch.arange(depth, device=device)
        at_BPD = place_BP1 + along_D % (self.lengths_B[:, None, None] - place_BP1)
        tokens_BPD = self.tokens_BL.gather(1, (at_BPD + self.start).flatten(1)).view_as(at_BPD)
        tokens_BPD = torch.where(size_BP1 > 0, tokens_BPD, NO_TOKEN)
        marks_BPD = ((tokens_BPD + 1) * powers(device)[1 : depth + 1]).cumsum(-1)
        alike_BPPD = marks_BPD[:, :, None] == marks_BPD[:, None]
        first_BPD = ~(alike_BPPD & self._earlier_PP).any(2) & (size_BP1 > 0)
        # Possible next tokens at the same place: each once, ranked by the order of the copies.
        ways_BPPD = torch.nn.functional.pad(alike_BPPD, (1, -1), value=True) & first_BPD[:, None]
        rank_BPD = (ways_BPPD & self._earlier_PP).sum(2)
        index_BPD = (size_BP1 + along_D).clamp(max=_SIZES - 1) * _RANKS + rank_BPD.clamp(max=_RANKS - 1)
        factor_BPD = self._chances_X[index_BPD] * (rank_BPD < MOST_WAYS)
        total_BPD = (ways_BPPD * factor_BPD[:, None]).sum(2)
        # Paths with the same prefix share its probability, which is that of the first such path.
        own_BPD = (factor_BPD / total_BPD.clamp(min=1)).gather(1, alike_BPPD.to(torch.uint8).argmax(2))
        numbers_BPD3 = torch.stack([tokens_BPD, (along_D + 1).expand_as(tokens_BPD), marks_BPD], dim=-1)
        return Paths(numbers_BPD3.flatten(1, 2), torch.where(first_BPD, own_BPD.cumprod(-1), 0).flatten(1))


class CorpusTables:
    """A corpus as an automaton: its states are the n-grams with continuations, each with a tree of candidates.

    The state of a text is the longest of these n-grams that it ends with. Candidates depend only on the state, so their trees
    are grown in advance, on the device, and a round just looks them up.

    Parameters
    ----------
    trie : GramTrie
    nodes : int
        Candidates per state.
    depth : int
        Levels of a state's tree.
    device : torch.device
    """

    def __init__(self, trie: GramTrie, nodes: int, depth: int, device: torch.device) -> None:
        self.order = len(trie.level_sizes) - 1
        self._powers = powers(device)
        firsts_I = torch.from_numpy(trie.firsts_I.astype(np.int64)).to(device)
        tokens_N = torch.from_numpy(trie.tokens_N.astype(np.int64)).to(device)
        weights_N = torch.from_numpy(trie.weights_N.astype(np.int64)).to(device)
        grams_IO, sizes_I = self._grams(trie, firsts_I, tokens_N)
        node_S = (firsts_I[1:] > firsts_I[:-1]).nonzero()[:, 0]
        # State 0 is for texts without a match; longer n-grams have higher numbers.
        nothing_1O, nothing_1 = torch.full_like(grams_IO[:1], NO_TOKEN), torch.zeros_like(sizes_I[:1])
        self._grams_SO, sizes_S = torch.cat([nothing_1O, grams_IO[node_S]]), torch.cat([nothing_1, sizes_I[node_S]])
        self._keys_S, self._states_S = self._marks(self._grams_SO)[:, -1].sort()
        self._ways(node_S, sizes_S, firsts_I, tokens_N, weights_N)
        all_S = torch.arange(len(sizes_S), device=device)
        parts = [self._grown(state_X, nodes, depth) for state_X in torch.split(all_S, _CHUNK)]
        self.numbers_SM3, self.chances_SM = (torch.cat(part) for part in zip(*parts, strict=True))
        self._added_3 = torch.tensor([0, 1, 1], device=device)
        del self._way_tokens_SK, self._way_chances_SK, self._way_states_SK, self._grams_SO

    def _grams(self, trie: GramTrie, firsts_I: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the n-grams of all nodes above the last level, padded on the left with `NO_TOKEN`, and their lengths."""
        inner = len(firsts_I) - 1
        grams_IO = torch.full((inner, self.order), NO_TOKEN, device=tokens_N.device)
        grams_IO[:, -1] = tokens_N[:inner]
        sizes_I, start = torch.ones_like(tokens_N[:inner]), 0
        for level, count in enumerate(trie.level_sizes[: self.order]):
            nodes_X = torch.arange(start, start + count, device=tokens_N.device)
            if level:
                above_X = torch.searchsorted(firsts_I, nodes_X, right=True) - 1
                grams_IO[nodes_X, :-1] = grams_IO[above_X, 1:]
                sizes_I[nodes_X] = level + 1
            start += count
        return grams_IO, sizes_I

    def _marks(self, windows_XO: Tensor) -> Tensor:
        """Return the marks of the last 1, 2, ... tokens of texts."""
        return ((windows_XO.flip(-1) + 1) * self._powers[1 : self.order + 1]).cumsum(-1)

    def states(self, windows_XO: Tensor) -> Tensor:
        """Return the states of texts that end with these tokens."""
        marks_XO = self._marks(windows_XO)
        place_XO = torch.searchsorted(self._keys_S, marks_XO).clamp(max=len(self._keys_S) - 1)
        return torch.where(self._keys_S[place_XO] == marks_XO, self._states_S[place_XO], 0).amax(-1)

    def _ways(self, node_S: Tensor, sizes_S: Tensor, firsts_I: Tensor, tokens_N: Tensor, weights_N: Tensor) -> None:
        """Find the likeliest tokens of each state, its own before those of shorter ends, and the states that they lead to."""
        rank_K = torch.arange(MOST_WAYS, device=node_S.device)
        place_SK = firsts_I[node_S][:, None] + rank_K
        real_SK = place_SK < firsts_I[node_S + 1][:, None]
        place_SK = place_SK.clamp(max=len(tokens_N) - 1)
        tenths_X = torch.tensor(share_tenths(), device=node_S.device)
        own = (
            torch.where(real_SK, tokens_N[place_SK], NO_TOKEN),
            sizes_S[1:, None].expand_as(place_SK),
            tenths_X[(weights_N[node_S][:, None] - weights_N[place_SK]).clamp(min=0)],
        )
        ways = tuple(torch.nn.functional.pad(part, (0, 0, 1, 0), value=NO_TOKEN) for part in own)
        # The next shorter end of an n-gram is the n-gram without its first token.
        is_first_SO = torch.arange(self.order, device=node_S.device) == self.order - sizes_S[:, None]
        shorter_S = self.states(torch.where(is_first_SO, NO_TOKEN, self._grams_SO))
        for size in range(2, self.order + 1):
            state_X = (sizes_S == size).nonzero()[:, 0]
            if not len(state_X):
                continue
            both = [torch.cat([part[state_X], part[shorter_S[state_X]]], dim=1) for part in ways]
            known_XKK = both[0][:, :MOST_WAYS, None] == both[0][:, None, MOST_WAYS:]
            missing_XK = both[0] == NO_TOKEN
            missing_XK[:, MOST_WAYS:] |= known_XKK.any(1)
            order_XK = missing_XK.to(torch.uint8).sort(dim=1, stable=True).indices[:, :MOST_WAYS]
            both[0] = torch.where(missing_XK, NO_TOKEN, both[0])
            for part, found in zip(ways, both, strict=True):
                part[state_X] = found.gather(1, order_XK)
        tokens_SK, sizes_SK, tenths_SK = ways
        places = [(size, rank, tenth) for size in (1, 2, 3) for rank in (0, 1, 2) for tenth in range(11)]
        chances_X = torch.tensor([share_chance(size, rank, tenth / 10 + 0.05) for size, rank, tenth in places])
        index_SK = ((sizes_SK - 1).clamp(0, 2) * 3 + rank_K.clamp(max=2)) * 11 + tenths_SK.clamp(min=0)
        chances_SK = torch.where(tokens_SK == NO_TOKEN, 0, chances_X.to(node_S.device)[index_SK])
        self._way_tokens_SK, self._way_chances_SK = tokens_SK, chances_SK / chances_SK.sum(1, keepdim=True).clamp(min=1)
        parts = zip(torch.split(self._grams_SO, _CHUNK), torch.split(tokens_SK, _CHUNK), strict=True)
        self._way_states_SK = torch.cat([self.states(self._one_further(*part)) for part in parts])

    def _one_further(self, grams_XO: Tensor, tokens_XK: Tensor) -> Tensor:
        """Return the last tokens of texts with one more token, for each of these tokens."""
        return torch.cat([grams_XO[:, None, 1:].expand(-1, tokens_XK.shape[1], -1), tokens_XK[..., None]], dim=-1)

    def _grown(self, state_X: Tensor, nodes: int, depth: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest paths from these states: the numbers and probabilities of `Paths`."""
        empty_XM = torch.zeros(len(state_X), nodes, dtype=torch.long, device=state_X.device)
        kept = [empty_XM, empty_XM, empty_XM, empty_XM, empty_XM.float()]  # tokens, depths, marks, states, chances
        front = (state_X[:, None], torch.zeros_like(state_X[:, None]), torch.ones_like(state_X[:, None], dtype=torch.float32))
        for level in range(1, depth + 1):
            states_XW, marks_XW, chances_XW = front
            tokens_XWK = self._way_tokens_SK[states_XW]
            new = [
                tokens_XWK,
                torch.full_like(tokens_XWK, level),
                marks_XW[..., None] + (tokens_XWK + 1) * self._powers[level],
                self._way_states_SK[states_XW],
                self._way_chances_SK[states_XW] * chances_XW[..., None],
            ]
            pool = [torch.cat([old, part.flatten(1)], dim=1) for old, part in zip(kept, new, strict=True)]
            best_XM = pool[-1].topk(nodes).indices
            kept = [part.gather(1, best_XM) for part in pool]
            front = (kept[3], kept[2], torch.where(kept[1] == level, kept[-1], 0))  # only paths of this level go on
            if not bool((front[-1] > 0).any()):
                break
        return torch.stack(kept[:3], dim=-1), kept[-1]

    def paths(self, windows_BXO: Tensor, stems: Paths) -> Paths:
        """Return the candidates after X paths of each row; windows are the last tokens of text and path."""
        states_BX = self.states(windows_BXO)
        depths_BX = stems.numbers_BX3[..., 1]
        # Depths add up, and so do marks, after those of the tree are shifted by the path's depth. Tokens stay.
        begun_BX13 = (stems.numbers_BX3 * self._added_3)[:, :, None]
        numbers_BXM3 = self.numbers_SM3[states_BX]
        numbers_BXM3[..., 2] *= self._powers[depths_BX][..., None]
        chances_BXM = stems.chances_BX[..., None] * self.chances_SM[states_BX]
        return Paths((numbers_BXM3 + begun_BX13).flatten(1, 2), chances_BXM.flatten(1))
