"""What a decision model learns from: real rounds of a pair, with what the draft showed and what the target made of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polydraft.decision import Decision, law_inputs
from polydraft.drafters import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.engine import Decoder
from polydraft.models import FeatureHead, LanguageModel
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import DraftTree, Topology
from polydraft.walks import Verdict

TOP = 10
"""Probabilities of a law that are kept."""


@dataclass(frozen=True, eq=False)
class Traces:
    """Drafted tokens that verification came to, one a row."""

    hidden_RF: Tensor
    """The draft's features that the token's law came from."""
    laws_RK: Tensor
    """Likeliest probabilities of that law and its entropy."""
    ratios_R: Tensor
    """min(1, p/q) of the token."""
    accepted_R: Tensor
    """1 where it was accepted, 0 where rejected."""

    @classmethod
    def joined(cls, parts: Sequence["Traces"]) -> "Traces":
        """Put traces one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def rows(self, index_R: Tensor) -> "Traces":
        """Return some of them."""
        return Traces(*(getattr(self, name)[index_R] for name in self.__dataclass_fields__))


@dataclass(eq=False)
class _Recorder(Decision):
    """A decision that never stops, and takes down what it could have looked at."""

    shown: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def goes_on(self, features_BGF: Tensor, logits_BGV: Tensor) -> Tensor:
        """Go on."""
        self.shown.append((features_BGF[:, 0].float(), law_inputs(logits_BGV[:, 0], TOP)))
        return torch.ones(len(features_BGF), dtype=torch.bool, device=features_BGF.device)


class _Tracing(Drafter):
    """A chain of drafts whose rounds are taken down."""

    name = "tracing"

    def __init__(self, parts: Parts, recorder: _Recorder, traces: list[Traces], greedy: bool) -> None:
        self._make = DRAFTERS.get("head" if isinstance(parts.draft, FeatureHead) else "model")
        self._parts, self._recorder, self._traces, self._greedy = parts, recorder, traces, greedy

    def start(self, params: RowParams, target: LanguageModel) -> DraftSession:
        """Go to work, looking over the session's shoulder."""
        session: Any = self._make(self._parts).start(params, target)
        propose, commit = session.propose, session.commit
        trees: list[DraftTree] = []

        def propose_noting(tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
            self._recorder.shown.clear()
            trees[:] = [propose(tail_B2, uniforms_BU)]
            return trees[0]

        def commit_noting(verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> Tensor | None:
            self._note(trees[0], verdict, keep_B, target.head(features_BNF), params.rows[0].temperature)
            report: Tensor | None = commit(verdict, keep_B, features_BNF)
            return report

        session.propose, session.commit = propose_noting, commit_noting
        # The wrapped methods may not be recorded as a graph: they look at values.
        session.obstacle = lambda: "traces are taken"
        checked: DraftSession = session
        return checked

    def _note(self, tree: DraftTree, verdict: Verdict, keep_B: Tensor, logits_BNV: Tensor, temperature: float) -> None:
        """Take down the tokens of a chain up to and including the first rejected one."""
        for depth, (hidden_BF, law_BK) in enumerate(self._recorder.shown):
            token_B1 = tree.tokens_BN[:, depth + 1, None].clamp(min=0)
            node_B = torch.full_like(token_B1[:, 0], depth)
            if self._greedy:
                ratio_B = (logits_BNV[:, depth].argmax(-1) == token_B1[:, 0]).float()
            else:
                target_B1 = torch.softmax(logits_BNV[:, depth].float() / temperature, dim=-1).gather(1, token_B1)
                ratio_B = (target_B1 / tree.draft_law(depth, node_B).gather(1, token_B1)).clamp(max=1)[:, 0]
            seen_B = (keep_B > 0) & (verdict.accepted_B >= depth)
            accepted_B = (verdict.accepted_B > depth).float()
            parts = (hidden_BF, law_BK, ratio_B, accepted_B)
            self._traces.append(Traces(*(part[seen_B].cpu() for part in parts)))


def collect(
    target: LanguageModel,
    draft: LanguageModel | FeatureHead,
    prompts: Sequence[list[int]],
    *,
    count: int,
    depth: int,
    rows: int,
    new_tokens: int,
    eos_token_ids: Sequence[int],
    seed: int,
    advance: Callable[[int], None],
) -> Traces:
    """Decode prompts, greedily and at temperature 1 by turns, until there are `count` traces.

    Parameters
    ----------
    target, draft : the pair
    prompts : sequence of token-id lists
        Used again, with other seeds, as often as needed.
    count : int
        Drafted tokens wanted.
    depth : int
        Tokens that are drafted a round.
    rows : int
        Texts side by side.
    new_tokens : int
        Most new tokens of a text.
    eos_token_ids : sequence of int
    seed : int
    advance : callable
        Told how many traces there are.
    """
    traces: list[Traces] = []
    batch = 0
    while (have := sum(len(part.ratios_R) for part in traces)) < count:
        advance(have)
        recorder = _Recorder()
        # A greedy text is the same whatever the seed: each prompt is decoded greedily once, then only sampled.
        first = (batch // 2) * rows
        greedy = batch % 2 == 0 and first < len(prompts)
        scheme = "top" if greedy else "speculative"
        parts = Parts(target=target, draft=draft, topology=Topology.fork(1, depth), scheme=scheme, decision=recorder)
        decoder = Decoder(target, _Tracing(parts, recorder, traces, greedy), eos_token_ids=eos_token_ids, walk="node")
        texts = [prompts[(first + row) % len(prompts)] for row in range(min(rows, len(prompts)) if greedy else rows)]
        decoder.generate(
            texts, sampling=SamplingParams(temperature=0.0 if greedy else 1.0), max_new_tokens=new_tokens, seed=seed + batch
        )
        batch += 1
    advance(count)
    return Traces.joined(traces)
