"""Self-Draft's branches: tokens that ride along in the target's passes and teach the context cache.

References
----------
.. [1] Gao et al. 2025, Multi-Branch Self-Drafting for LLM Inference Acceleration, "Multi-branch drafting", Algorithm 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polydraft.errors import UsageError, unknown_name
from polydraft.models import LanguageModel
from polydraft.sampling import NO_TOKEN
from polydraft.trees import MAX_NODES, DraftTree

SEEDS = ("vocabulary", "prompt")


@dataclass(frozen=True, kw_only=True)
class RiderOptions:
    """How many branches ride along, and how they begin."""

    branches: int = 6
    """N of [1]; 0 for none."""
    length: int = 6
    """Most tokens of a branch, L of [1]."""
    seeds: str = "prompt"
    """Where the first token of a branch is drawn from: the ``"prompt"``, or the ``"vocabulary"`` as in [1]."""

    def __post_init__(self) -> None:
        for name, value, least in (("branches", self.branches, 0), ("branch_length", self.length, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r} is out of range; allowed: whole numbers from {least}")
        if self.seeds not in SEEDS:
            raise unknown_name("branch_seeds", self.seeds, SEEDS)
        if self.most >= MAX_NODES:
            raise UsageError(
                f"{self.branches} branches of {self.length} tokens are too many for one pass; allowed: below {MAX_NODES} in all"
            )

    @property
    def most(self) -> int:
        """Most riders in a pass."""
        return self.branches * self.length


class Riders:
    """Branches of a batch, on the device; X is branches, P tokens along a branch.

    Each branch token sees the text, the pending token included, and its own branch before it. The target's best token after
    every prefix of a branch is a draft; branches grow by the last one, and beyond their length drop their first token. All
    of it depends on the past only.

    Deviation from [1]: drafts are the target's best tokens at any temperature: sampled ones would only make the cache
    noisier.
    """

    def __init__(self, options: RiderOptions, target: LanguageModel) -> None:
        positions = target.max_positions
        if positions is not None and options.branches and options.length >= positions:
            raise UsageError(
                f"branch_length={options.length} does not fit the model's context of {positions}; allowed: 1 to {positions - 1}"
            )
        self.options, self._target = options, target
        self._tokens_BXP: Tensor | None = None
        """Tokens of the branches, first ones first; rows that began later have fewer."""
        self._lengths: list[int] = []
        """Tokens that the branches of each row have; 0 for rows whose first pass is the next one."""
        self._grown_from: list[int] = []
        """The same before the last pass."""
        self._seeds: dict[int, Tensor] = {}
        """Prompts from which the first tokens of new rows are drawn."""

    @property
    def num_uniforms(self) -> int:
        """Random numbers per row and round. Only a row's first round uses them, but its neighbours must not notice when."""
        return self.options.branches

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Forget the branches of some rows; new ones begin with the next pass."""
        if not self.options.branches:
            return
        self._lengths += [0] * (len(texts) - len(self._lengths))
        for row in rows:
            self._lengths[row] = 0
            if self.options.seeds == "prompt":
                self._seeds[row] = torch.tensor(list(texts[row]), device=self._target.device)

    def resize(self, rows: int) -> None:
        """Have so many rows; further ones begin before they are asked."""
        self._lengths = [*self._lengths, *([0] * rows)][:rows] if self.options.branches else []
        self._seeds = {row: seed for row, seed in self._seeds.items() if row < rows}
        if self._tokens_BXP is not None:
            missing = max(rows - len(self._tokens_BXP), 0)
            fresh_BXP = torch.full_like(self._tokens_BXP[:1], NO_TOKEN).expand(missing, -1, -1)
            self._tokens_BXP = torch.cat([self._tokens_BXP[:rows], fresh_BXP])

    def attach(self, tree: DraftTree, uniforms_BX: Tensor) -> DraftTree:
        """Add the branches' tokens to a pass, as nodes after all others that no child table names."""
        if not self.options.branches:
            return tree
        if self._tokens_BXP is None:
            size = (*uniforms_BX.shape, 1)
            self._tokens_BXP = torch.full(size, NO_TOKEN, device=tree.tokens_BN.device)
        for row in [row for row, length in enumerate(self._lengths) if length == 0]:
            self._tokens_BXP[row] = NO_TOKEN
            self._tokens_BXP[row, :, 0] = self._first_tokens(row, uniforms_BX[row])
            self._lengths[row] = 1
        self._tokens_BXP = self._tokens_BXP[:, :, : max(self._lengths)]
        batch_size, nodes = tree.tokens_BN.shape
        branches, length = self._tokens_BXP.shape[1:]
        riders, device = branches * length, tree.tokens_BN.device
        place_X = torch.arange(riders, device=device)
        branch_X, along_X = place_X // length, place_X % length
        ancestors_BNN = torch.nn.functional.pad(tree.ancestors_BNN, (0, riders, 0, riders))
        ancestors_BNN[:, nodes:, 0] = True
        ancestors_BNN[:, nodes:, nodes:] = (branch_X[:, None] == branch_X) & (along_X[:, None] >= along_X)
        return replace(
            tree,
            tokens_BN=torch.cat([tree.tokens_BN, self._tokens_BXP.flatten(1)], dim=1),
            depths_BN=torch.cat([tree.depths_BN, (along_X + 1).expand(batch_size, -1)], dim=1),
            ancestors_BNN=ancestors_BNN,
            child_table_BNK=torch.nn.functional.pad(tree.child_table_BNK, (0, 0, 0, riders)),
            riders=riders,
            levels=None,
        )

    def _first_tokens(self, row: int, uniforms_X: Tensor) -> Tensor:
        if row in self._seeds:
            prompt_T = self._seeds.pop(row)
            return prompt_T[(uniforms_X * len(prompt_T)).long()]
        return (uniforms_X * self._target.vocab_size).long()

    def commit(self, features_BNF: Tensor) -> Tensor | None:
        """Let the branches grow; return their tokens and the draft after each, for `grams`."""
        if self._tokens_BXP is None:
            return None
        tokens_BXP, most = self._tokens_BXP, self.options.length
        batch_size, branches, length = tokens_BXP.shape
        logits_BXV = self._target.head(features_BNF[:, -branches * length :])
        drafts_BXP = logits_BXV.argmax(-1).view(batch_size, branches, length)
        ends_BX1 = torch.tensor(self._lengths, device=tokens_BXP.device)[:, None, None].expand(-1, branches, 1)
        grown_BXP = torch.nn.functional.pad(tokens_BXP, (0, 1), value=NO_TOKEN)
        grown_BXP = grown_BXP.scatter(2, ends_BX1, drafts_BXP.gather(2, ends_BX1 - 1))
        # Full branches drop their first token.
        kept_P = torch.arange(min(length + 1, most), device=tokens_BXP.device)
        self._tokens_BXP = grown_BXP.gather(2, (kept_P + (ends_BX1 == most)).clamp(max=length))
        self._grown_from = list(self._lengths)
        self._lengths = [min(own + 1, most) for own in self._lengths]
        return torch.stack([tokens_BXP, drafts_BXP], dim=2).flatten(1)

    def grams(self, row: int, report: Sequence[int], gram: int) -> Iterator[Sequence[int]]:
        """Read n-grams off a row of what `commit` returned: up to `gram` tokens of a branch, and the draft after them."""
        own, length = self._grown_from[row], len(report) // (2 * self.options.branches)
        for start in range(0, len(report), 2 * length):
            branch, drafts = report[start : start + own], report[start + length : start + length + own]
            for stop in range(min(gram, own), own + 1):
                yield [*branch[max(stop - gram, 0) : stop], drafts[stop - 1]]
