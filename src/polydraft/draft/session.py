"""`DraftSession`, one class for every drafter at work: it connects builders and their sources to the rounds of a batch."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polydraft.draft.border import Border, SideStream
from polydraft.draft.builder import Builder
from polydraft.models import Context
from polydraft.models.language_model import Observer
from polydraft.models.prefixes import Prefixes
from polydraft.rows import ByRow
from polydraft.sampling import RowParams
from polydraft.trees import DraftTree, union
from polydraft.verify import Naive, Scheme, Verdict, Walk, resolve_walk

_NAIVE = Naive()


@dataclass(frozen=True)
class Capturable:
    """How much of a session's rounds can be captured as a CUDA graph, and replayed for any text."""

    never: str | None = None
    """Why no round can be captured; None if they can."""
    not_now: str | None = None
    """Why the next round, unlike others, cannot be replayed."""
    host_tree: Callable[[Tensor, Tensor], DraftTree] | None = None
    """Builds the host's tree from last tokens and random numbers; all the rest of a round is captured."""
    waits: bool = True
    """Whether the next round needs what the host learns from the last one."""
    kind: Hashable = ()
    """The host's choices for the next round; each needs its own capture."""
    static: bool = False
    """Whether the host knows the shape of the next tree."""


class DraftSession(ByRow):
    """A drafter at work on one batch: a drawn tree, a trie of certain candidates, both, or neither.

    `propose` and `commit` run on the device without looking at values, as far as `capturable` says; all other methods run on
    the host. New texts begin with `prepare`, then the target reads them, then `begin`. With both trees, the walk may leave the
    drawn one for the trie, and never comes back.

    Parameters
    ----------
    name : str
        Source of drawn tokens, in statistics.
    drawn : Builder, optional
        Draws candidates from a draft's distributions.
    certain : Builder, optional
        Lists candidates that depend only on the past.
    rests : str, optional
        Why there is neither, although there is a draft: it would not pay.
    """

    def __init__(
        self, name: str, *, drawn: Builder | None = None, certain: Builder | None = None, rests: str | None = None
    ) -> None:
        self._name, self._drawn, self._certain, self._rests = name, drawn, certain, rests
        self._builders = [builder for builder in (drawn, certain) if builder is not None]
        self.num_nodes = 1 + sum(builder.num_nodes - 1 for builder in self._builders)
        self.depth = max((builder.depth for builder in self._builders), default=0)
        """Levels below the root of every proposal."""
        if drawn is not None and certain is not None:
            certain.beside_draft = True
        for builder in self._builders:
            captured = all(one.obstacle is None for one in self._builders)
            builder.source.make_room(places=builder.places, depth=self.depth, captured=captured)
        self.target_places = max([self.num_nodes, *(builder.source.borrowed_places for builder in self._builders)])
        """Uncommitted places in the target's cache that a round uses."""
        self._drafted = True
        """Whether the source was asked for the last drawn tree."""
        self._border = Border(drawn.depth) if drawn is not None and certain is not None else None
        self._side_stream = SideStream()
        self._reports: list[tuple[int, Callable[[Sequence[Sequence[int]]], None]]] = []
        """Width of each part of the last round's report, and the function that takes it."""

    def borrow(self, context: Context) -> None:
        """Lend the target's own cache to sources that work in it."""
        for builder in self._builders:
            builder.source.borrow(context)

    @property
    def scheme(self) -> Scheme:
        """How the next tree is drawn, and so how it must be verified; may change with the rows' parameters."""
        return _NAIVE if self._drawn is None else self._drawn.scheme

    @property
    def num_uniforms(self) -> int:
        """How many random numbers per row the next `propose` uses."""
        return sum(builder.num_uniforms for builder in self._builders)

    @property
    def contexts(self) -> Sequence[Context]:
        """Caches that rounds write to."""
        return [context for builder in self._builders for context in builder.source.contexts]

    @property
    def capturable(self) -> Capturable:
        """How much of the next round can be captured."""
        never = next((builder.obstacle for builder in self._builders if builder.obstacle), None)
        not_now = next((builder.source.obstacle for builder in self._builders if builder.source.obstacle), None)
        at_work = [builder for builder in self._builders if not builder.asleep]
        waits = any(builder.learns or builder.source.learns for builder in at_work) or self._catches_up
        kind = tuple(builder.kind for builder in self._builders)
        on_host = self._certain is not None and self._certain.on_host and not self._certain.asleep
        static = all(builder.static for builder in self._builders)
        return Capturable(never, not_now, self._host_tree if on_host else None, waits, kind, static)

    @property
    def _catches_up(self) -> bool:
        """Whether the draft has to read accepted n-gram tokens between two rounds."""
        if self._drawn is None or self._certain is None or self._certain.asleep:
            return False
        return not self._drawn.source.follows_any_path

    def wake(self, *, ahead: bool) -> None:
        """Get ready for the next round; `ahead` says that the last round's outcome is not known yet."""
        for builder in self._builders:
            builder.wake(ahead=ahead)

    @property
    def num_kinds(self) -> int:
        """How many captures rounds with the current number of rows need, at one cache size, to cover all host choices."""
        return max((builder.num_kinds for builder in self._builders), default=1)

    def rehearse(self, number: int | None) -> None:
        """Make all rounds of the kind with this number; None ends the rehearsal."""
        for builder in self._builders:
            builder.rehearse(number)

    def made_up(self, dtype: torch.dtype) -> DraftTree | None:
        """Return a made-up tree for compilation; see `Builder.made_up`."""
        return None if self._drawn is None or self._certain is not None else self._drawn.made_up(dtype)

    def resolve_walk(self, name: str) -> Walk:
        """Return the walk that verifies the proposals; `name` is what the user asked for, possibly ``"auto"``."""
        builder = self._certain or self._drawn
        return resolve_walk(name, _NAIVE, insist=False) if builder is None else builder.resolve_walk(name)

    @property
    def elastic(self) -> bool:
        """Whether the number of rows may change, see `resize`."""
        return all(builder.elastic for builder in self._builders)

    @property
    def movable(self) -> bool:
        """Whether rows can be swapped, see `swap_rows`."""
        return self.elastic and all(builder.movable and builder.source.movable for builder in self._builders)

    @property
    def reach(self) -> int:
        """Most levels of the round that `wake` prepared last; unlike `depth`, without those of sleeping builders."""
        return max((builder.depth for builder in self._builders if not builder.asleep), default=0)

    @property
    def rest_reason(self) -> str | None:
        """Why a row without candidates in the last round had none; None for plain decoding."""
        return " and ".join(dict.fromkeys(builder.rest_reason for builder in self._builders)) or self._rests

    def share(self, loads: Sequence[int]) -> None:
        """Set how many rows share each row's rounds, as far as its drafts may depend on it."""
        for builder in self._builders:
            builder.share(loads)

    def row_parts(self) -> Iterable[ByRow]:
        """Return the builders, with their sources."""
        return self._builders

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed."""
        for builder in self._builders:
            builder.use(params)

    def recall(self, row: int, text: Sequence[int], space: Hashable, prefixes: Prefixes) -> None:
        """Paste a text's cached prefix into a row, in place of all else; `prepare` and `begin` follow."""
        for builder in self._builders:
            builder.source.recall(row, text, space, prefixes)

    def keep(self, row: int, space: Hashable, prefixes: Prefixes, *, whole: bool) -> None:
        """Copy a row's caches into the prefix cache: whole blocks only, or all of it."""
        for builder in self._builders:
            builder.source.keep(row, space, prefixes, whole=whole)

    def prepare(
        self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], unread: Sequence[int], keep: bool
    ) -> tuple[Sequence[int] | None, Observer | None]:
        """Say how the target should read the texts of `rows`; other rows go on with what they have.

        Returns how many cached tokens of each text it may reuse (None for all), and the callback that gets its features, if
        a source has one.

        Parameters
        ----------
        texts : sequence of token-id lists, one per row
        longest : int
            Largest length that the texts may reach.
        rows : sequence of int
        unread : sequence of int
            Rows whose texts the target reads from the start, cached or not.
        keep : bool
            Whether sources may use what they have learnt from earlier texts.
        """
        limits, observer = None, None
        for builder in self._builders:
            source = builder.source
            if not keep:
                source.forget(rows)
            own = source.prepare(texts, longest, rows)
            limits, observer = own if limits is None else limits, source.observer or observer
        if unread:
            known = [len(text) for text in texts] if limits is None else limits
            limits = [0 if row in unread else limit for row, limit in enumerate(known)]
        return limits, observer

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Get ready to continue `texts`, whose last token is pending, up to `longest` tokens.

        Only `rows` are new; other rows go on, with what was learnt from them. `params` are all rows' parameters from now on.
        """
        for builder in self._builders:
            builder.source.begin(texts, longest, rows)
            builder.begin(texts, rows, params)

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor, host_tree: DraftTree | None = None) -> DraftTree:
        """Return a tree below the pending token, the second of each row's last two tokens.

        Parameters
        ----------
        tail_B2 : Tensor
            The first is 0 where a text has only one token.
        uniforms_BU : Tensor
        host_tree : DraftTree, optional
            What `capturable.host_tree` returned, if it has already been called.
        """
        asleep = self._certain is not None and self._certain.asleep
        if self._drawn is None:
            if self._certain is None or asleep:
                return DraftTree.bare(tail_B2[:, 1], self.depth)
            return self._attached(host_tree or self._host_tree(tail_B2, uniforms_BU), uniforms_BU)
        certain = host_tree
        if certain is None and self._certain is not None and not asleep:
            with nullcontext() if self._certain.on_host else self._side_stream.running(tail_B2.device):
                certain = self._host_tree(tail_B2, uniforms_BU)
        if self._certain is not None and not asleep and self._certain.suffices is not None and self._drawn.policy is not None:
            self._drawn.policy.skip(self._certain.suffices)
        self._drafted = not self._drawn.resting
        drawn = self._drawn.build(tail_B2, uniforms_BU[:, : self._drawn.num_uniforms])
        if self._border is not None:
            self._border.nodes = drawn.tokens_BN.shape[1]
        if certain is None:  # as deep as other rounds, so that outcomes are as wide
            return replace(drawn, depth=self.depth, reach=self.reach) if asleep else drawn
        self._side_stream.join(tail_B2.device)
        return union(drawn, self._attached(certain, uniforms_BU))

    def _host_tree(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        assert self._certain is not None
        return self._certain.build(tail_B2, self._certain_uniforms(uniforms_BU))

    def _attached(self, certain: DraftTree, uniforms_BU: Tensor) -> DraftTree:
        assert self._certain is not None
        return self._certain.attached(certain, self._certain_uniforms(uniforms_BU))

    def _certain_uniforms(self, uniforms_BU: Tensor) -> Tensor:
        return uniforms_BU[:, 0 if self._drawn is None else self._drawn.num_uniforms :]

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
        """Keep what the verdict accepted: the root and accepted nodes, `keep_B` in all; 0 for idle rows.

        `features_BNF` are the target's, at all nodes. The returned whole numbers `[B, X]` reach the host with the round's
        outcome, in the same copy, and go to `receive`.
        """
        reports: list[tuple[Tensor | None, Callable[[Sequence[Sequence[int]]], None]]] = []
        for builder in self._builders:
            builder.move(keep_B)
        if self._drawn is not None:
            source, own, own_keep_B = self._drawn.source, verdict, keep_B
            if self._border is not None:
                own, own_keep_B = self._border.cut(verdict, keep_B)
                reports.append((own_keep_B[:, None], self._border.receive))
            places_BD = self._drawn.places_of(own.path_BD)
            if source.follows_any_path:
                own, own_keep_B = verdict, keep_B
            if self._drafted:
                reports.append((source.commit(own, places_BD, own_keep_B, features_BNF), source.receive))
            else:
                source.skip(own, own_keep_B, features_BNF)
            self._drawn.learn(own, own_keep_B, features_BNF)
        if self._certain is not None:
            source_of_grams = self._certain.source
            report_BX = source_of_grams.commit(verdict, verdict.path_BD, keep_B, features_BNF)
            reports.append((report_BX, source_of_grams.receive))
        made = [(report, take) for report, take in reports if report is not None]
        self._reports = [(report.shape[1], take) for report, take in made]
        return torch.cat([report for report, _ in made], dim=1) if made else None

    def receive(self, reports: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]) -> list[list[str]]:
        """Take what `commit` returned, on the host and before `settle`; return who proposed each accepted token.

        Parameters
        ----------
        reports : sequence of int lists, one per row
        accepted : sequence of token-id lists, one per row
            Without the token that the target added.
        """
        start = 0
        for width, take in self._reports:
            take([report[start : start + width] for report in reports])
            start += width
        names = [self._credits(row, tokens) for row, tokens in enumerate(accepted)]
        if self._certain is not None:
            found = enumerate(zip(names, accepted, strict=True))
            self._certain.took([len(own) - self._drawn_of(row, tokens) for row, (own, tokens) in found])
        return names

    def _credits(self, row: int, tokens: Sequence[int]) -> list[str]:
        """Return the draft's name for each drawn token, and a cache's name for each token after these."""
        if not tokens:
            return []
        drawn = self._drawn_of(row, tokens)
        own = None if self._drawn is None else self._drawn.credits(row, tokens[:drawn])
        names = [*(own or [self._name] * len(tokens[:drawn]))]
        return names if self._certain is None else [*names, *(self._certain.credits(row, tokens) or ())[drawn:]]

    def _drawn_of(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many of a row's accepted tokens were drawn: they come first."""
        if self._border is not None:
            return self._border.drawn(row, tokens)
        return 0 if self._drawn is None else len(tokens)

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Store on the host the texts after a round, and the tokens that it added."""
        if self._certain is not None:
            self._certain.source.settle(texts, emitted)
            self._certain.advance(emitted)
        if self._drawn is None:
            return
        source = self._drawn.source
        self._drawn.advance(emitted)
        if self._border is None or source.follows_any_path:
            source.settle(texts, emitted)
            return
        behind = self._border.behind(emitted)
        known = [text[: len(text) - less] for text, less in zip(texts, behind, strict=True)]
        source.settle(known, [tokens[: len(tokens) - less] for tokens, less in zip(emitted, behind, strict=True)])
        if any(behind):
            source.catch_up(texts)

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Drop what was committed beyond `texts`, after some were cut at their end."""
        for builder in self._builders:
            builder.source.rewind(texts)
