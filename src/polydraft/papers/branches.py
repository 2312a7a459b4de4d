"""Self-Draft's branches: tokens that ride along in the target's passes and teach the context cache.

References
----------
.. [1] Gao et al. 2025, Multi-Branch Self-Drafting for LLM Inference Acceleration, "Multi-branch drafting", Algorithm 1.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from polydraft.devices import assign, brought
from polydraft.draft.gram_options import RiderOptions
from polydraft.draft.gram_source import RIDERS, Riders
from polydraft.errors import UsageError
from polydraft.models import LanguageModel
from polydraft.models.language_model import round_up
from polydraft.rows import ByRow
from polydraft.sampling import NO_TOKEN, RowParams, SamplingParams, Warper, draw_one
from polydraft.trees import DraftTree


@RIDERS.register("branches")
class Branches(Riders):
    """The branches of a batch, on the device. Axis X: branches; P: tokens along a branch.

    Each branch token sees the text, including the pending token, and the earlier tokens of its branch. The target's best token
    after every prefix of a branch is a draft. A branch grows by the last of these, and at full length drops its first token.
    All this depends only on the past. The tensors keep their size and address, so that rounds can be captured; tokens that a
    branch does not have yet are missing nodes.

    Deviations from [1]: a branch begins with one random token, not several. Drafts are the target's best tokens at any
    temperature, because drawn ones only make the cache noisier. Branches teach the cache before they are full. `DrawnBranches`
    follows [1] in the last two points.
    """

    ROW_STATE: ClassVar[tuple[str, ...]] = ("tokens_BXP", "lengths_B", "seeds_BT", "sizes_B")
    FORGETS = True

    def __init__(self, options: RiderOptions, target: LanguageModel, batch_size: int) -> None:
        positions = target.max_positions
        if positions is not None and options.length >= positions:
            raise UsageError(
                f"branch_length={options.length} does not fit the model's context of {positions}; allowed: 1 to {positions - 1}"
            )
        self.options, self._target = options, target
        size, device = (batch_size, options.branches, options.length), target.device
        self.tokens_BXP = torch.full(size, NO_TOKEN, device=device)
        """Tokens of the branches, in order."""
        self.lengths_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        """Length of each row's branches; 0 before a row's first pass."""
        self.seeds_BT = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        """Prompts from which the first tokens of new rows are drawn."""
        self.sizes_B = torch.ones(batch_size, device=device, dtype=torch.float64)
        """Number of tokens from which a row's first ones are drawn."""

    @property
    def kind(self) -> Hashable:
        """The size of `seeds_BT`, on which captures depend."""
        return self.seeds_BT.shape[1]

    @property
    def num_uniforms(self) -> int:
        """Random numbers per row and round. Only a row's first round uses them, but every round consumes that many."""
        return self.options.branches

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Forget the branches of some rows; new branches begin with the next pass."""
        from_prompt = self.options.seeds == "prompt"
        wanted = round_up(max((len(texts[row]) for row in rows), default=1)) if from_prompt else 1
        if wanted > self.seeds_BT.shape[1]:
            self.seeds_BT = torch.nn.functional.pad(self.seeds_BT, (0, wanted - self.seeds_BT.shape[1]))
        for row in rows:
            self.lengths_B[row].fill_(0)
            self.sizes_B[row].fill_(len(texts[row]) if from_prompt else self._target.vocab_size)
            if from_prompt:
                self.seeds_BT[row, : len(texts[row])].copy_(brought(torch.tensor(list(texts[row])), self.seeds_BT.device))

    def attach(self, tree: DraftTree, uniforms_BX: Tensor) -> DraftTree:
        """Add the branches' tokens to a pass, as nodes after all others that are in no child table."""
        branches, length = self.tokens_BXP.shape[1:]
        if not self._ride:
            return tree
        device, riders = tree.tokens_BN.device, branches * length
        first_BX = (uniforms_BX * self.sizes_B[:, None]).long()
        if self.options.seeds == "prompt":
            first_BX = self.seeds_BT.gather(1, first_BX)
        new_B1 = self._at_work(self.lengths_B == 0)[:, None]
        self.tokens_BXP.masked_fill_(new_B1[..., None], NO_TOKEN)
        self.tokens_BXP[:, :, 0] = torch.where(new_B1, first_BX, self.tokens_BXP[:, :, 0])
        self.lengths_B.add_(new_B1[:, 0])
        batch_size, nodes = tree.tokens_BN.shape
        place_X = torch.arange(riders, device=device)
        branch_X, along_X = place_X // length, place_X % length
        ancestors_BNN = torch.nn.functional.pad(tree.ancestors_BNN, (0, riders, 0, riders))
        ancestors_BNN[:, nodes:, 0] = True
        ancestors_BNN[:, nodes:, nodes:] = (branch_X[:, None] == branch_X) & (along_X[:, None] >= along_X)
        return replace(
            tree,
            tokens_BN=torch.cat([tree.tokens_BN, self.tokens_BXP.flatten(1)], dim=1),
            depths_BN=torch.cat([tree.depths_BN, (along_X + 1).expand(batch_size, -1)], dim=1),
            ancestors_BNN=ancestors_BNN,
            child_table_BNK=torch.nn.functional.pad(tree.child_table_BNK, (0, 0, 0, riders)),
            riders=riders,
            levels=None,
        )

    def commit(self, features_BNF: Tensor) -> Tensor | None:
        """Let the branches grow; return their tokens, the draft after each, and their length, for `grams`."""
        batch_size, branches, length = self.tokens_BXP.shape
        if not self._ride:
            return None
        drafts_BXP = self._drafts(self._target.head(features_BNF[:, -branches * length :])).view(batch_size, branches, length)
        report_BX = torch.cat([torch.stack([self.tokens_BXP, drafts_BXP], dim=2).flatten(1), self.lengths_B[:, None]], 1)
        ends_BX1 = self.lengths_B[:, None, None].expand(-1, branches, 1)
        grown_BXP = torch.nn.functional.pad(self.tokens_BXP, (0, 1), value=NO_TOKEN)
        grown_BXP = grown_BXP.scatter(2, ends_BX1, drafts_BXP.gather(2, (ends_BX1 - 1).clamp(min=0)))
        # Full branches drop their first token.
        kept_P = torch.arange(length, device=features_BNF.device)
        grown_BXP = grown_BXP.gather(2, kept_P + (ends_BX1 == length))
        grows_B = self._at_work(self.lengths_B >= 0)
        self.tokens_BXP.copy_(grown_BXP.where(grows_B[:, None, None], self.tokens_BXP))
        self.lengths_B.add_(grows_B).clamp_(max=length)
        return report_BX

    def _drafts(self, logits_BXV: Tensor) -> Tensor:
        """Choose the token after each branch token."""
        return logits_BXV.argmax(-1)

    @property
    def _ride(self) -> bool:
        """Whether this round has branches."""
        return self.resting_B is None or not bool(self.resting_B.all())

    def _at_work(self, rows_B: Tensor) -> Tensor:
        return rows_B if self.resting_B is None else rows_B & ~self.resting_B

    def grams(self, report: Sequence[int], gram: int) -> Iterator[Sequence[int]]:
        """Yield n-grams from a row that `commit` returned: up to `gram` tokens of a branch, and the draft after them."""
        own, length = report[-1], self.options.length
        for start in range(0, len(report) - 1, 2 * length):
            branch, drafts = report[start : start + own], report[start + length : start + length + own]
            for stop in range(min(gram, own), own + 1):
                yield [*branch[max(stop - gram, 0) : stop], drafts[stop - 1]]


@RIDERS.register("drawn-branches")
class DrawnBranches(Branches):
    """Branches as in [1]: drafts are drawn like the text's own tokens, and only full branches teach the cache.

    [1] updates the cache with `k = G` to `L` once branches are full. It does not mention branches shorter than G; here they
    teach all of their tokens.
    """

    ROW_STATE = (*Branches.ROW_STATE, "greedy_B")

    def __init__(self, options: RiderOptions, target: LanguageModel, batch_size: int) -> None:
        super().__init__(options, target, batch_size)
        params = RowParams.of(SamplingParams(), batch_size)
        self._warper = Warper(params, target.vocab_size, [()] * batch_size, target.device)
        self._uniforms_BX: Tensor | None = None
        self.greedy_B = torch.zeros(batch_size, dtype=torch.bool, device=target.device)

    def row_parts(self) -> Iterable[ByRow]:
        """Return the warper, which knows the rows' texts and parameters."""
        return (self._warper,)

    @property
    def kind(self) -> Hashable:
        """Captures also depend on the sampling parameters."""
        return super().kind, self._warper.kind

    @property
    def num_uniforms(self) -> int:
        """One per branch for its first token, and one per draft."""
        return self.options.branches + self.options.most

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows, and set the sampling parameters of all rows."""
        super().begin(texts, rows, params)
        self._warper.admit(params, rows, [texts[row] for row in rows])
        assign(self.greedy_B, params.greedy)

    def use(self, params: RowParams) -> None:
        """Set the sampling parameters of all rows."""
        self._warper.use(params)
        assign(self.greedy_B, params.greedy)

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the texts, for penalties."""
        self._warper.advance(emitted)

    def attach(self, tree: DraftTree, uniforms_BX: Tensor) -> DraftTree:
        """Add the branches' tokens, and keep the random numbers of the drafts for `commit`."""
        self._uniforms_BX = uniforms_BX[:, self.options.branches :]
        return super().attach(tree, uniforms_BX[:, : self.options.branches])

    def _drafts(self, logits_BXV: Tensor) -> Tensor:
        assert self._uniforms_BX is not None, "attach() comes first"
        batch_size, branches, length = self.tokens_BXP.shape
        # The path to each branch token: its branch, up to itself.
        earlier_PP = torch.ones(length, length, dtype=torch.bool, device=logits_BXV.device).tril()
        paths_BXPP = torch.where(earlier_PP, self.tokens_BXP[:, :, None], NO_TOKEN)
        probs_BXV = self._warper.probs(logits_BXV[..., : self._target.vocab_size], paths_BXPP.flatten(1, 2))
        drawn_BX = draw_one(probs_BXV.flatten(0, 1), self._uniforms_BX.flatten()).view(batch_size, branches * length)
        return torch.where(self.greedy_B[:, None], super()._drafts(logits_BXV), drawn_BX)

    def grams(self, report: Sequence[int], gram: int) -> Iterator[Sequence[int]]:
        """Yield n-grams from full branches only."""
        return super().grams(report, gram) if report[-1] == self.options.length else iter(())
