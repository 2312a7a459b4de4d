"""Builders, which decide the nodes of a draft tree: their interface, and the distributions that they draw from."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from polydraft.draft.policy import REST_REASON, RowPolicy
from polydraft.draft.source import DistributionSource, Source
from polydraft.rows import ByRow
from polydraft.sampling import RowParams, Warper
from polydraft.trees import DraftTree
from polydraft.verify import Scheme, Verdict, Walk, resolve_walk


class Builder(ByRow, ABC):
    """Builds the trees of one batch, round by round, from what a source provides.

    `build` and `learn` run on the device without looking at values, unless there is an `obstacle`.
    """

    source: Source
    num_nodes: int
    """Most nodes of a tree, root included."""
    depth: int
    """Levels below the root, the same in every round."""
    obstacle: str | None = None
    """Why rounds cannot be captured; None if `build` and `learn` are pure functions of tensors."""
    static: bool = False
    """Whether the host knows the shape of every tree, the same for all rows."""
    on_host: bool = False
    """Whether `build` runs on the host, and a capture takes its tree as an input."""
    learns: bool = False
    """Whether the next round may depend on what the host learns from the last one."""
    asleep: bool = False
    """Whether the next tree is the root alone, whatever the host learns from the last round."""
    beside_draft: bool = False
    """Whether a draft proposes in the same rounds."""
    elastic: bool = False
    """Whether the number of rows may change, see `resize`."""
    movable: bool = False
    """Whether rows can be swapped, see `swap_rows`."""
    policy: RowPolicy | None = None
    """On a CPU: which rows rest, and how much the others draft; None if no row may rest."""
    asked_scheme: str | None = None
    """The scheme that the user named. If they also named a walk, it must be able to verify this scheme."""

    @property
    @abstractmethod
    def scheme(self) -> Scheme:
        """How the next tree is drawn, and so how it must be verified; may change with the rows' parameters."""

    @property
    @abstractmethod
    def num_uniforms(self) -> int:
        """How many random numbers per row the next `build` uses."""

    @property
    def suffices(self) -> Sequence[bool] | None:
        """Rows whose last tree promises so much that they need no draft; None if this builder cannot tell."""
        return None

    @property
    def resting(self) -> bool:
        """Whether the next tree is the root alone, and the source is not asked."""
        return self.policy is not None and self.policy.idle and self.source.can_wait

    @property
    def rest_reason(self) -> str:
        """Why a row without candidates in the last round had none."""
        return REST_REASON if self.policy is None else self.policy.rest_reason

    def attached(self, tree: DraftTree, uniforms_BU: Tensor) -> DraftTree:
        """Add the device's part to a tree that the host built; `uniforms_BU` as for `build`."""
        return tree

    def made_up(self, dtype: torch.dtype) -> DraftTree | None:
        """Build a tree from made-up logits so that its kernels are compiled; None if there are no kernels.

        It launches the same kernels as `build`, and does not touch the rounds' own tensors.
        """
        return None

    def wake(self, *, ahead: bool) -> None:
        """Get ready for the next tree; `ahead` says that the last round's outcome is not known yet.

        What is decided here must be the same with `ahead` and without, so it must not depend on that outcome.
        """

    @property
    def kind(self) -> Hashable:
        """The host's choices for the next round that a capture depends on."""
        return None

    @property
    def num_kinds(self) -> int:
        """How many different values `kind` can have."""
        return 1

    def rehearse(self, number: int | None) -> None:
        """Make all rounds of the kind with this number, to capture it before it is needed; None ends the rehearsal."""

    @property
    def places(self) -> int:
        """Most places that a round's passes take in the source's cache."""
        return self.num_nodes

    def resolve_walk(self, name: str) -> Walk:
        """Return the walk that verifies the trees; `name` is what the user asked for, possibly ``"auto"``."""
        # A walk that does not fit is refused only if the user also chose the scheme: at temperature 0, `top` replaces it.
        return resolve_walk(name, self.scheme, insist=self.asked_scheme == self.scheme.name)

    def share(self, loads: Sequence[int]) -> None:
        """Set how many rows share each row's rounds: the more, the smaller the trees that pay."""
        if self.policy is not None:
            self.policy.share(loads)

    def row_parts(self) -> Iterable[ByRow]:
        """Return the source and the policy."""
        return (self.source,) if self.policy is None else (self.source, self.policy)

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed."""

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows, and set the parameters of all rows."""
        if self.policy is not None:
            self.policy.begin(rows)

    @abstractmethod
    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Return a tree below the pending token, the second of each row's last two tokens."""

    def places_of(self, path_BD: Tensor) -> Tensor:
        """Return the places of some of the last tree's nodes in the source's passes."""
        return path_BD

    def learn(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Learn from the verdict on the last tree."""
        if self.policy is not None:
            self.policy.learn(verdict.accepted_B.tolist(), (keep_B > 0).tolist())

    def move(self, counts_B: Tensor) -> None:
        """Count newly emitted tokens, on the device, whoever proposed them."""

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the texts, on the host."""

    def took(self, counts: Sequence[int]) -> None:
        """Learn on the host how many n-gram candidates each row accepted."""

    def credits(self, row: int, tokens: Sequence[int]) -> Sequence[str] | None:
        """Return who proposed each of a row's accepted tokens; None if it can only be the drafter itself."""
        return None


class DraftDistributions(ByRow):
    """A source's distributions after temperature, truncation and penalties, which trees are drawn from.

    Parameters
    ----------
    source : DistributionSource
    params : RowParams
        The draft's initial parameters.
    vocab_size : int
        The target's.
    ranking_temperature : float
        See `Warper`.
    """

    def __init__(
        self, source: DistributionSource, params: RowParams, vocab_size: int, ranking_temperature: float = 1.0
    ) -> None:
        self.vocabulary, self.params = source.vocabulary, params
        self.vocab_size = vocab_size
        none = [()] * len(params)
        self._warper = Warper(
            params, vocab_size, none, source.device, True, self.vocabulary, ranking_temperature=ranking_temperature
        )

    @property
    def num_columns(self) -> int:
        """Tokens that the distributions cover, and so the most children a node can have."""
        return self.vocab_size if self.vocabulary is None else len(self.vocabulary.tokens_D)

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows, whose tokens penalties count, and set the parameters of all rows."""
        self.params = params
        self._warper.admit(params, rows, [texts[row] for row in rows])

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed."""
        self.params = params
        self._warper.use(params)

    def row_parts(self) -> Iterable[ByRow]:
        """Return the warper, which knows the rows' texts and parameters."""
        return (self._warper,)

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the texts."""
        self._warper.advance(emitted)

    def move(self, counts_B: Tensor) -> None:
        """Count newly emitted tokens, on the device."""
        self._warper.move(counts_B)

    def prepared(self, logits_BWV: Tensor, paths_BWP: Tensor, depth: int) -> Tensor:
        """Return the logits of nodes at some depth as `probs` and `ranking` need them; see `Warper.prepared`."""
        if not any(self.params.coupled):
            return logits_BWV
        return self._warper.prepared(self._aligned(logits_BWV), paths_BWP, depth)

    def largest(self, logits_BWV: Tensor, paths_BWP: Tensor, depth: int, count: int) -> Tensor | None:
        """Return the columns of the largest noisy scores of nodes at some depth, `[B, W, count]`, not `prepared`.

        None if no row is coupled. On a host that is faster than to add noise to all scores.
        """
        if not any(self.params.coupled):
            return None
        return self._warper.largest(self._aligned(logits_BWV), paths_BWP, depth, count)

    def probs(self, logits_BWV: Tensor, paths_BWP: Tensor) -> Tensor:
        """Return the probabilities after some paths, over the draft's own columns if its vocabulary is partial."""
        return self._warper.probs(self._aligned(logits_BWV), paths_BWP)

    def ranking(self, logits_BWV: Tensor, paths_BWP: Tensor) -> Tensor:
        """Return weights in the same order as the probabilities, for when only the order matters."""
        return self._warper.ranking(self._aligned(logits_BWV), paths_BWP)

    @property
    def needs_paths(self) -> bool:
        """Whether `prepared` depends on the paths to the nodes."""
        return any(self.params.coupled) and self.params.needs_history

    @property
    def in_order(self) -> bool:
        """Whether the largest logits, if `prepared`, belong to the tokens that rank first."""
        return self._warper.in_order

    @property
    def temperature_B(self) -> Tensor | None:
        """Temperature of each row; None if `probs` is more than a softmax of the logits over the temperature."""
        return self._warper.temperature_B

    def tokens(self, columns_BX: Tensor) -> Tensor:
        """Return the tokens of some columns."""
        return columns_BX if self.vocabulary is None else self.vocabulary.tokens(columns_BX)

    def _aligned(self, logits_BWV: Tensor) -> Tensor:
        """Return logits over the target's tokens, or over the draft's own columns if its vocabulary is partial."""
        if self.vocabulary is not None:
            return logits_BWV
        # Padding rows of either model's table get no mass.
        missing = self.vocab_size - logits_BWV.shape[-1]
        return torch.nn.functional.pad(logits_BWV, (0, missing), value=-torch.inf) if missing else logits_BWV


class DistributionBuilder(Builder):
    """A builder that takes children from a draft's distributions, by drawing or by rank."""

    source: DistributionSource
    _distributions: DraftDistributions

    @abstractmethod
    def _draft_params(self, params: RowParams) -> RowParams:
        """Return the draft's sampling parameters, given the target's."""

    def _bare(self, root_B: Tensor) -> DraftTree:
        """Return lone roots, for rounds in which nothing is drafted, with the depth that outcomes have in all rounds."""
        distributions, columns = tuple[Tensor, ...](), self._distributions.num_columns
        if not self.scheme.follows_target:  # no child was drawn, so any distribution will do
            distribution_111 = torch.full((1, 1, 1), 1 / columns, device=root_B.device)
            distributions = (distribution_111.expand(len(root_B), 1, columns),) * self.depth
        return DraftTree.bare(root_B, self.depth, distributions, self._distributions.vocabulary)

    def row_parts(self) -> Iterable[ByRow]:
        """Return the draft's distributions as well."""
        return *super().row_parts(), self._distributions

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed."""
        self._distributions.use(self._draft_params(params))

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows, and set the parameters of all rows."""
        super().begin(texts, rows, params)
        self._distributions.begin(texts, rows, self._draft_params(params))

    def move(self, counts_B: Tensor) -> None:
        """Count newly emitted tokens, on the device."""
        self._distributions.move(counts_B)

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the texts."""
        self._distributions.advance(emitted)
