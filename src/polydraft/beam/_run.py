"""One request with beams, from its prompt to its finished texts: the parts that search and sampling share."""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from polydraft.beam._distribution import Continuations, DistributionMaker
from polydraft.beam._node import Beam, Ends, Hypothesis, Node, Pool, Stops, common_path
from polydraft.beam._predictions import DraftPredictions, TargetPredictions
from polydraft.beam._reader import TreeReader, tree_reader
from polydraft.beam._workspace import BeamWorkspace
from polydraft.beam.options import BeamOptions, Draws
from polydraft.engine import Stats, StopReason
from polydraft.errors import FailureError
from polydraft.models import Head, LanguageModel
from polydraft.sampling import SamplingParams

_LAST_WEIGHT = 0.2
"""Weight of the last round in the running mean of accepted layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BeamRequest:
    """Everything that a run needs to know."""

    target: LanguageModel
    draft: LanguageModel | Head | None = None
    """Ignored if `options.twins` is set. Without draft and twins, every round is one step of plain beam decoding."""
    prompt: Sequence[int]
    params: SamplingParams
    options: BeamOptions
    eos_token_ids: frozenset[int] = frozenset()
    max_new_tokens: int
    stops: Stops = field(default_factory=Stops)

    def ends(self) -> Ends:
        """Return where its texts end."""
        longest, reason = self.max_new_tokens, StopReason.LENGTH
        limit = self.target.max_positions
        if limit is not None and len(self.prompt) + longest > limit:
            longest, reason = limit - len(self.prompt), StopReason.CONTEXT
        return Ends(self.eos_token_ids, longest, reason, self.stops)

    def distribution(self, reader: TreeReader | None, best: int | None) -> DistributionMaker:
        """Return the maker of the target's distributions or, given its reader, of the draft's."""
        return DistributionMaker(
            self.params,
            self.prompt,
            self.target.vocab_size,
            self.target.device,
            vocabulary=None if reader is None else reader.vocabulary,
            best=best,
            draft=None if reader is None else reader.name,
        )


@dataclass(frozen=True, eq=False)
class ForestLayer:
    """Draft beams of one step, and the distribution that they were drawn from."""

    parents: list[Beam]
    """The input beams, or the unfinished draft beams of the layer before: the rows of `continuations`."""
    continuations: Continuations
    drawn: list[int]
    """Entries of `continuations` that were drawn, in draw order."""
    beams: list[Beam]
    """The drawn entries as beams, in the same order."""


def close_draws(drawn: Sequence[Beam], options: BeamOptions, ends: Callable[[Node], bool]) -> tuple[list[Beam], list[Beam]]:
    """Split a step's draws, which come in draw order, into beams that continue and beams that have ended."""
    running = [beam for beam in drawn if not ends(beam.node)]
    if options.draws == Draws.HUGGING_FACE:  # only the first W may end, and only the W best of the others continue
        running = sorted(running, key=lambda beam: -beam.score)[: options.beams]
        drawn = drawn[: options.beams]
    return running, [beam for beam in drawn if ends(beam.node)]


@dataclass(frozen=True, eq=False)
class _Launched:
    """A target pass under way."""

    layers: list[ForestLayer]
    nodes: list[Node]
    replayed: int
    """Passes replayed from a capture."""


class BeamRun(ABC):
    """Decodes in rounds: grow a draft forest, read it in one target pass, take all steps that this pass allows.

    The workspace holds the caches of the request's models, so that later requests can reuse them.
    """

    def __init__(self, request: BeamRequest, workspace: BeamWorkspace | None = None) -> None:
        self._started = time.perf_counter()
        self.stats = Stats()
        self.options, self.ends = request.options, request.ends()
        self.pool = Pool(self.options.beams, self.options.length_penalty, self.options.early_stopping, self.ends.longest)
        root = Node(request.prompt[-1])
        self.beams = [Beam(root, 0.0)]
        """Running beams, all of the same length."""
        self.pass_of_step: list[int] = []
        """The round of each step."""
        self._reach = float(self.options.depth_of_drafts)
        """Running mean of the layers that a round accepts."""
        self._cancelled = False
        self._launched: _Launched | None = None
        self._workspace = workspace or BeamWorkspace(request.target, request.draft, graphs=False)
        self._workspace.claim = weakref.ref(self)
        self._begin(request, root)

    @torch.inference_mode()
    def _begin(self, request: BeamRequest, root: Node) -> None:
        """Read the prompt with target and draft."""
        work, prompt = self._workspace, request.prompt
        with self.stats.clock("prefill"), work.at_work():
            work.restart(len(prompt), len(prompt) + self.ends.longest)
        drafting = None if self.options.twins else work.draft_memory
        reader = None if drafting is None else tree_reader(drafting)
        own = request.distribution(None, self._best(of_draft=False))
        with self.stats.clock("prefill"), work.at_work():
            memory = work.target_memory
            memory.context.prefill([prompt[:-1]], None if reader is None else reader.observer)
            alone = self.options.model_only
            keeps = self.options.twins or (reader is not None and not alone)
            self.target = TargetPredictions(request.target, memory, own, packs=work.packs, keeps=keeps)
            self.draft: DraftPredictions | None = None
            if reader is not None:
                reader.begin(prompt, root, self.target.tree)
                drafted = request.distribution(reader, self._best(of_draft=True))
                self.draft = DraftPredictions(self.target, prompt, reader, drafted, packs=work.packs, model_only=alone)
            elif self.options.twins:
                self.draft = DraftPredictions(self.target, prompt)

    @abstractmethod
    def _best(self, *, of_draft: bool) -> int | None:
        """Return how many of a text's best continuations can matter, by the target or the draft; None for all."""

    @abstractmethod
    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        """Return which continuations become draft beams, in order."""

    @abstractmethod
    def _verify(self, layers: list[ForestLayer]) -> int:
        """Take as many steps as the target's pass allows; return their number."""

    @property
    def draft_name(self) -> str | None:
        """Name of the draft, if there is one."""
        return None if self.draft is None else self.draft.name

    @property
    def _candidates(self) -> int:
        """Continuations per step, by Hugging Face's rule: enough for W beams to continue, however many end with an end token.

        Stop strings may end more of them. Then fewer than W beams continue, or none.
        """
        return max(2, 1 + len(self.ends.eos_token_ids)) * self.options.beams

    @property
    def _width(self) -> int:
        """Draws per step of fixed width."""
        return self._candidates if self.options.draws == Draws.HUGGING_FACE else self.options.beams

    @property
    def done(self) -> bool:
        """Whether decoding is over: no beam is running, or the run was cancelled."""
        return not self.beams or self._cancelled

    @property
    def length(self) -> int:
        """New tokens of each running beam."""
        return len(self.pass_of_step)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one round; if the target's passes bring distributions along, also launch the next pass."""
        if self._workspace.spoiled:
            raise FailureError("a round of these beams was interrupted and its state is unknown; start the request again")
        with self._workspace.at_work():
            launched, self._launched = self._launched or self._launch(), None
            self._decide(launched)
            if not self.done:
                if self._workspace.ahead and self.target.come_with_the_pass:
                    self._launched = self._launch()
                self._tidy()

    def _launch(self) -> _Launched:
        """Let the draft grow a forest, and launch the target's pass over it."""
        with self.stats.clock("draft"):
            layers = [] if self.draft is None else self._grow(self.draft)
        with self.stats.clock("target"):
            nodes = [beam.node for beam in self.beams]
            # No step needs the distribution after a text that has ended.
            nodes += [beam.node for layer in layers for beam in layer.beams if not self.ends.at(beam.node)]
            nodes = list(dict.fromkeys(nodes))
            tree = self.target.tree
            replayed = tree.replayed_passes
            tree.read(nodes)
        return _Launched(layers, nodes, tree.replayed_passes - replayed)

    def _depth(self) -> int:
        """Return how many layers to draft: one more than recent rounds accepted. It depends only on the past."""
        room = self.ends.longest - self.length - 1
        worth = self.options.depth_of_drafts if self.options.model_only else int(self._reach + 1.5)
        return min(self.options.depth_of_drafts, worth, room)

    def _grow(self, draft: DraftPredictions) -> list[ForestLayer]:
        """Let the draft take steps of beam decoding from the running beams.

        Notes
        -----
        The beams start with the target's scores, which are known, and not with the draft's as in the paper: verification is
        exact whatever drafts are drawn from, and this distribution is closer to the target's. Also, the draft's truncation may
        exclude tokens that the target has emitted. Finished draft beams have no children, and neither do beams without a guess;
        the forest ends when no beam has children.
        """
        layers: list[ForestLayer] = []
        parents = list(self.beams)
        for _ in range(self._depth()):
            if not parents:
                break
            nodes = [beam.node for beam in parents]
            continuations = draft.after(nodes)
            totals_X = continuations.totals(parents)
            drawn = self._choose_drafts(continuations, parents)
            if not drawn:
                break
            chosen = (values_X[drawn].tolist() for values_X in (continuations.rows_X, continuations.tokens_X, totals_X))
            drafts = [Beam(nodes[row].child(token), total) for row, token, total in zip(*chosen, strict=True)]
            layers.append(ForestLayer(parents, continuations, drawn, drafts))
            parents = [beam for beam in drafts if not self.ends.at(beam.node)]
        return layers

    def _decide(self, launched: _Launched) -> None:
        """Take the steps that the target's pass allows."""
        stats, layers = self.stats, launched.layers
        with stats.clock("target"):
            if self.draft is not None:
                self.draft.learn(launched.nodes)
            self.target.collect(launched.nodes, [beam.node for beam in self.beams])
        with stats.clock("verify"):
            steps = self._verify(layers)
        if layers:
            # If the whole forest was accepted, more layers might have been.
            found = steps - 1 + (steps > len(layers))
            self._reach += _LAST_WEIGHT * (found - self._reach)
        stats.count(steps - 1, min(steps, len(layers)))
        stats.rounds += 1
        stats.replayed_rounds += launched.replayed
        stats.total_seconds = time.perf_counter() - self._started

    def _tidy(self) -> None:
        """Free memory that no beam needs, while the device works on the next pass, if one was launched."""
        with self.stats.clock("commit"):
            leaves, below = [beam.node for beam in self.beams], [] if self._launched is None else self._launched.nodes
            self.target.tree.keep(leaves, below)
            self.ends.stops.keep([*leaves, *below, *(one.node for one in self.pool.best)])
            if self.draft is not None:
                self.draft.keep(leaves, below)

    def _child(self, beams: Sequence[Beam], continuations: Continuations, entry: int, total: float) -> Beam:
        """Return the beam that an entry of its continuations makes."""
        node = beams[int(continuations.rows_X[entry])].node.child(int(continuations.tokens_X[entry]))
        node.log_prob = float(continuations.log_probs_X[entry])
        return Beam(node, total)

    def _close(self, drawn: Sequence[Beam]) -> None:
        """End a step with these draws, given in draw order."""
        self._finish_step(*close_draws(drawn, self.options, self.ends.at))

    def _finish_step(self, running: Sequence[Beam], ended: Sequence[Beam]) -> None:
        """End a step: add ended beams to the pool, and continue the others unless the pool is done."""
        length = self.length + 1
        for beam in ended:
            self.pool.add(beam.node, beam.score, self.ends.reason(beam.node))
        self.pass_of_step.append(self.stats.rounds)
        if not running and not self.pool.best:
            emptied_by = self.target.distribution.emptied_by
            culprit = f"logits processor {emptied_by!r}" if emptied_by else "the sampling settings"
            raise FailureError(
                f"{culprit} left no beam a token to continue with after {self.length} new tokens; leave at least one with a "
                "finite score"
            )
        best = max((beam.score for beam in running), default=float("-inf"))
        enough = not running or self.pool.is_done(best, length)
        self.beams = [] if enough else list(running)

    def settled(self) -> list[Node]:
        """Return the prefix that all texts that can still win share."""
        return common_path([beam.node for beam in self.beams] + [one.node for one in self.pool.best])

    def cancel(self) -> None:
        """Stop; running beams count as finished."""
        if not self.done:
            for beam in self.beams:
                if beam.node.depth:
                    self.pool.add(beam.node, beam.score, StopReason.CANCELLED)
        self._cancelled = True

    def results(self) -> list[Hypothesis]:
        """Return the finished texts, best first."""
        return self.pool.best[: self.options.num_return_sequences]
