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
        self._first_round = True
        self._prompts_BT: Tensor | None = None
        self._lengths_B1: Tensor | None = None

    @property
    def num_uniforms(self) -> int:
        """Random numbers a row that a round uses: for first tokens only."""
        return self.options.branches if self._first_round else 0

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """Forget all branches; new ones begin with the next pass."""
        self._tokens_BXP, self._first_round = None, True
        if self.options.branches and self.options.seeds == "prompt":
            longest, device = max(map(len, texts)), self._target.device
            padded = [[*text, *[0] * (longest - len(text))] for text in texts]
            self._prompts_BT = torch.tensor(padded, device=device)
            self._lengths_B1 = torch.tensor([[len(text)] for text in texts], device=device)

    def attach(self, tree: DraftTree, uniforms_BX: Tensor) -> DraftTree:
        """Add the branches' tokens to a pass, as nodes after all others that no child table names."""
        if not self.options.branches:
            return tree
        if self._tokens_BXP is None:
            self._tokens_BXP = self._first_tokens(uniforms_BX)[:, :, None]
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
        )

    def _first_tokens(self, uniforms_BX: Tensor) -> Tensor:
        if self._prompts_BT is not None and self._lengths_B1 is not None:
            return self._prompts_BT.gather(1, (uniforms_BX * self._lengths_B1).long())
        return (uniforms_BX * self._target.vocab_size).long()

    def commit(self, features_BNF: Tensor) -> Tensor | None:
        """Let the branches grow; return their tokens and the draft after each, for `grams`."""
        if self._tokens_BXP is None:
            return None
        tokens_BXP = self._tokens_BXP
        batch_size, branches, length = tokens_BXP.shape
        logits_BXV = self._target.head(features_BNF[:, -branches * length :])
        drafts_BXP = logits_BXV.argmax(-1).view(batch_size, branches, length)
        grown_BXP = torch.cat([tokens_BXP, drafts_BXP[:, :, -1:]], dim=2)
        self._first_round = False
        self._tokens_BXP = grown_BXP[:, :, -self.options.length :]
        return torch.stack([tokens_BXP, drafts_BXP], dim=2).flatten(1)

    def grams(self, report: Sequence[int], gram: int) -> Iterator[Sequence[int]]:
        """Read n-grams off a row of what `commit` returned: up to `gram` tokens of a branch, and the draft after them."""
        length = len(report) // (2 * self.options.branches)
        for start in range(0, len(report), 2 * length):
            branch, drafts = report[start : start + length], report[start + length : start + 2 * length]
            for stop in range(min(gram, length), length + 1):
                yield [*branch[max(stop - gram, 0) : stop], drafts[stop - 1]]
