"""Feature heads, which read the target's hidden states, as sources of distributions."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from polydraft.devices import assign, brought, can_sync
from polydraft.draft.policy import LONGEST_REST
from polydraft.draft.source import DistributionSource
from polydraft.models import Context, Head
from polydraft.models.heads.head_context import keep_entries, take_roots
from polydraft.models.heads.parallel_head import ParallelContext, ParallelHead
from polydraft.models.language_model import Observer
from polydraft.models.memory import NO_TEXT, common_prefix
from polydraft.models.prefixes import Prefixes
from polydraft.rows import ByRow
from polydraft.trees import Block, causal_block
from polydraft.verify import Verdict


class HeadSource(DistributionSource):
    """A feature head's cache for one batch.

    Slot i holds the entry made of the target's features at position i and the token at i + 1. Each round begins with the
    entries that the last one made certain (`fresh`): the accepted tokens and the pending one, the root, now with the target's
    true features instead of the head's guesses. Entries of rounds without drafts wait, and are read with them. In a text of one
    token nothing precedes the root: its entry has no features, and is not kept.
    """

    ROW_STATE = ("_texts", "_tokens_BW", "_features_BWF", "_fresh_B", "_lone_B")
    follows_any_path = movable = True

    def __init__(self, head: Head, batch_size: int) -> None:
        super().__init__(head.device, head.vocabulary)
        self._head = head
        self._context = head.start(batch_size, 1)
        self.contexts = (self._context,)
        self._places, self._captured = 1, False
        self._texts: list[Sequence[int]] = [()] * batch_size
        self._tokens_BW = torch.zeros(batch_size, 1, dtype=torch.long, device=head.device)
        self._fresh_blocks: dict[int, Block] = {}
        """Blocks of captured passes over the fresh entries, by number of rows; kept because captures use their tensors."""
        self._features_BWF: Tensor | None = None
        """The target's features; None before it has shown any."""
        self._fresh_B = torch.zeros_like(self._tokens_BW[:, 0])
        """How many of the W entries above are fresh."""
        self._lone_B: Tensor | None = None
        """Rows whose text is one token; only in a first round."""
        self._outputs_BWH: Tensor | None = None
        """Outputs of the last pass, within a round."""
        self._unseen: set[int] = set()
        """Rows of new texts that the target has not begun to read."""
        self._skipped = False
        self._skips = 0
        """Rounds without drafts since the last round with drafts."""
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        """Entries of these rounds: tokens, features, and how many of them count."""

    @property
    def obstacle(self) -> str | None:
        """Only a first round with a text of one token differs from the others."""
        return "a text has only one token" if self._lone_B is not None or self._features_BWF is None else None

    @property
    def can_wait(self) -> bool:
        """Whether the next round may skip this source: there is room for its entries, and none of them is unusual."""
        return self._skips < LONGEST_REST and self.obstacle is None

    @property
    def observer(self) -> Observer:
        """Read prompts along with the target."""
        return self._observe

    def borrow(self, context: Context) -> None:
        """Lend the target's own cache to the head."""
        self._context.borrow(context)

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Make room for a round's passes and its fresh entries; if rounds are not captured, also for waiting ones."""
        width = depth + 1
        self._captured = captured
        self._places = self._context.places = places + (width if captured else width * (1 + LONGEST_REST))
        if captured:
            self._tokens_BW = self._tokens_BW.new_zeros(len(self._tokens_BW), width)

    def row_parts(self) -> Iterable[ByRow]:
        """Return the head's context."""
        return (self._context,)

    def new_row(self, name: str) -> Sequence[int] | int:
        """Start without text and fresh entries."""
        return () if name == "_texts" else 0

    def before_rows_change(self) -> None:
        """Move waiting entries to their rows."""
        self._take_waiting()

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> None:
        """Paste a text's cached prefix into a row, in place of all else; an entry is made of a token and the next one."""
        known = prefixes.paste(self._context, row, (space, *text[:1]), text[1:-1])
        self._texts[row] = text[: known + 1]
        self._context.rewind([known if one == row else length for one, length in enumerate(self._context.lengths)])

    def keep(self, row: int, space: Hashable, prefixes: Prefixes, *, whole: bool) -> None:
        """Copy a row's entries into the prefix cache."""
        text, held = self._texts[row], self._context.lengths[row]
        prefixes.keep(self._context, row, (space, *text[:1]), text[1 : held + 1], whole=whole)

    def prepare(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> Sequence[int] | None:
        """Keep the entries that the new text shares; the target must show the root's features again."""
        self._take_waiting()
        self._context.reserve(longest + self._places)
        kept, limits = list(self._context.lengths), [len(text) for text in texts]
        for row in rows:
            shared = common_prefix(self._texts[row], texts[row])
            kept[row] = limits[row] = max(min(kept[row], shared - 1, len(texts[row]) - 2), 0)
            if self._features_BWF is not None:
                self._features_BWF[row].zero_()
        self._texts, self._unseen = list(texts), set(rows)
        self._context.rewind(kept)
        return limits

    def _observe(self, rows: slice, starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        """Read entries along with the target; the root's entry waits for the first round."""
        held, texts = list(self._context.lengths), self._texts[rows]
        for row, start in enumerate(starts, start=rows.start):
            if row in self._unseen:
                self._unseen.remove(row)
                held[row] = start
        self._context.rewind(held)
        last = [start + count == len(text) - 1 for start, count, text in zip(starts, counts, texts, strict=True)]
        if self._features_BWF is None:
            whole_BWF = features_BTF.new_zeros(*self.every_row("_tokens_BW").shape, features_BTF.shape[-1])
            self._features_BWF = self.keep_rows("_features_BWF", whole_BWF, len(self._tokens_BW))
            assert self._features_BWF is not None
        for row, (count, ends) in enumerate(zip(counts, last, strict=True)):
            if count and ends:
                self._features_BWF[rows.start + row, 0] = features_BTF[row, count - 1]
        kept = [count - (ends and count > 0) for count, ends in zip(counts, last, strict=True)]
        size = max(kept)
        if size:
            following = [
                list(text[start + 1 : start + 1 + count]) for text, start, count in zip(texts, starts, kept, strict=True)
            ]
            tokens_BT = brought(torch.tensor([tokens + [0] * (size - len(tokens)) for tokens in following]), self.device)
            self._context.reserve(max(held[rows]) + size)
            fused_BTH = self._context.fused(features_BTF[:, :size])
            if self._context.has_room(rows, size):
                self._context.part(rows).store(tokens_BT, fused_BTH)
            else:
                for row, (own, count) in enumerate(zip(range(rows.start, rows.stop), kept, strict=True)):
                    if count:
                        one = slice(own, own + 1)
                        self._context.part(one).store(tokens_BT[row : row + 1, :count], fused_BTH[row : row + 1, :count])
        for row, count in enumerate(kept, start=rows.start):
            held[row] += count
        self._context.rewind(held)

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int]) -> None:
        """Make the pending tokens the only fresh entries."""
        index_X, roots_X = brought(torch.tensor([list(rows), [texts[row][-1] for row in rows]]), self.device)
        self._tokens_BW[index_X, 0] = roots_X
        self._fresh_B.index_fill_(0, index_X, 1)  # assigning a number would wait for the device
        lone = [row in rows and len(text) == 1 and text is not NO_TEXT for row, text in enumerate(texts)]
        self._lone_B = brought(torch.tensor(lone), self.device) if any(lone) else None

    def root(self, tail_B2: Tensor) -> Tensor:
        """Read and commit the fresh entries; the last of them is the root's."""
        self._take_waiting()
        self._skips = 0
        root_B1H = self._read_fresh()
        self._context.settle([max(len(text) - 2, 0) for text in self._texts])
        self._outputs_BWH = root_B1H
        return root_B1H

    def _read_fresh(self) -> Tensor:
        """Read the fresh entries, commit all but the root's, and return the root's output."""
        outputs_BWH = self._context.read(self._tokens_BW, self._fused_fresh(), self._fresh_block(len(self._tokens_BW)))
        return take_roots(outputs_BWH, self._fresh_B, self._context.lengths_B)

    def _fresh_block(self, rows: int) -> Block:
        if not self._captured:
            return causal_block(rows, self._tokens_BW.shape[1], self.device)
        if rows not in self._fresh_blocks:
            self._fresh_blocks[rows] = causal_block(rows, self._tokens_BW.shape[1], self.device)
        return self._fresh_blocks[rows]

    def _fused_fresh(self) -> Tensor:
        if self._features_BWF is None:  # all texts have one token
            size = (*self._tokens_BW.shape, self._head.hidden_size)
            return torch.zeros(size, dtype=self._head.dtype, device=self.device)
        return self._context.fused(self._features_BWF)

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        """Pass a level, with its parents' outputs in place of the target's features."""
        assert self._outputs_BWH is not None, "root() comes first"
        outputs_BWH = self._context.read(tokens_BW, self._outputs_BWH, block, parents)
        self._outputs_BWH = outputs_BWH
        return outputs_BWH

    def logits(self, features_BWF: Tensor) -> Tensor:
        """Apply the output head."""
        return self._head.head(features_BWF)

    def commit(self, verdict: Verdict, places_BD: Tensor, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Keep the root's entry; later ones are read again, with the target's features, in the next round that drafts."""
        self._skipped = False
        if self._captured and self._features_BWF is not None and self._lone_B is None:
            kept, lengths_B = (self._tokens_BW, self._features_BWF, self._fresh_B), self._context.lengths_B
            keep_entries(verdict.tokens_BD, verdict.path_BD, keep_B, features_BNF, lengths_B, kept)
            return
        root_B = (keep_B > 0).long()
        self._context.advance(root_B if self._lone_B is None else root_B * ~self._lone_B)
        self._lone_B = None
        tokens_BW, features_BWF = self._accepted(verdict, keep_B, features_BNF)
        if not self._captured or self._features_BWF is None:
            self._tokens_BW, self._features_BWF, self._fresh_B = tokens_BW, features_BWF, keep_B
        else:
            self._tokens_BW.copy_(tokens_BW)
            self._features_BWF.copy_(features_BWF)
            self._fresh_B.copy_(keep_B)

    def _accepted(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> tuple[Tensor, Tensor]:
        """Return a round's new tokens, and the target's features before each."""
        tokens_BW, path_BW = verdict.tokens_BD, verdict.path_BD
        if not self._captured and can_sync(keep_B):  # leave out entries that no row keeps
            fresh = max(int(keep_B.max()), 1)
            tokens_BW, path_BW = tokens_BW[:, :fresh], path_BW[:, :fresh]
        return tokens_BW, features_BNF.gather(1, path_BW[..., None].expand(-1, -1, features_BNF.shape[-1]))

    def skip(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Queue the `keep_B` entries of a round; with n-grams, there may be several."""
        assert self._features_BWF is not None and self._lone_B is None, "a first round always asks for the root"
        self._skipped, self._skips = True, self._skips + 1
        self._waiting.append((*self._accepted(verdict, keep_B, features_BNF), keep_B))

    def _take_waiting(self) -> None:
        """Append the entries of rounds without drafts to the fresh ones."""
        if not self._waiting or self._features_BWF is None:
            return
        pad, waiting, device = torch.nn.functional.pad, self._waiting, self.device
        room = sum(tokens_BX.shape[1] for tokens_BX, _, _ in waiting)
        tokens_BW, features_BWF = pad(self._tokens_BW, (0, room)), pad(self._features_BWF, (0, 0, 0, room))
        for tokens_BX, features_BXF, keep_B in waiting:
            place_BX = self._fresh_B[:, None] + torch.arange(tokens_BX.shape[1], device=device)
            # Entries beyond `keep_B` are written as well; the next ones overwrite them.
            tokens_BW.scatter_(1, place_BX, tokens_BX)
            features_BWF.scatter_(1, place_BX[..., None].expand_as(features_BXF), features_BXF)
            self._fresh_B = self._fresh_B + keep_B
        most = max(int(self._fresh_B.max()), 1) if can_sync(self._fresh_B) else tokens_BW.shape[1]
        self._tokens_BW, self._features_BWF = tokens_BW[:, :most], features_BWF[:, :most]
        self._waiting = []

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Record the new texts."""
        if not self._skipped:
            self._context.settle(
                [
                    # A row without new tokens was idle in a round that has read all its fresh entries.
                    len(text) - len(tokens) - 1 if tokens else max(len(text) - 2, 0)
                    for text, tokens in zip(texts, emitted, strict=True)
                ]
            )
        self._texts = list(texts)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop all entries beyond the texts, fresh ones included."""
        self._take_waiting()
        held = [min(length, max(len(text) - 2, 0)) for length, text in zip(self._context.lengths, texts, strict=True)]
        fresh = [max(len(text) - 1 - length, 0) for text, length in zip(texts, held, strict=True)]
        self._context.rewind(held)
        assign(self._fresh_B, fresh)
        self._texts = list(texts)


class ParallelSource(HeadSource):
    """A parallel head's cache for one batch: the pass at the root gives the distributions of all levels.

    A level's distribution depends on the text alone, and all nodes of the level draw from it, whatever is above them. So
    children have the distribution that every verifier assumes.
    """

    _head: ParallelHead
    _context: ParallelContext

    def __init__(self, head: ParallelHead, batch_size: int) -> None:
        super().__init__(head, batch_size)
        self._outputs_BDH = self._logits_BDV = torch.empty(0)
        """Outputs and logits of all levels, within a round."""
        self._level = 0

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Make room for one pass instead of one per level."""
        super().make_room(places=self._head.shape.depths + 1, depth=depth, captured=captured)

    def _read_fresh(self) -> Tensor:
        """Read the fresh entries and compute all levels; one product with the output table gives all logits."""
        self._outputs_BDH = self._context.draft(self._tokens_BW, self._fused_fresh(), self._fresh_B)
        self._logits_BDV, self._level = self._head.head(self._outputs_BDH), 0
        self._context.advance((self._fresh_B - 1).clamp(min=0))
        return self._outputs_BDH[:, :1]

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        """Return the next level's output, for each of its nodes."""
        self._level += 1
        return self._outputs_BDH[:, self._level : self._level + 1].expand(-1, tokens_BW.shape[1], -1)

    def logits(self, features_BWF: Tensor) -> Tensor:
        """Return the current level's logits, for each of its nodes."""
        return self._logits_BDV[:, self._level : self._level + 1].expand(-1, features_BWF.shape[1], -1)
