"""One request with beams, from its prompt to its finished texts: what search and sampling share."""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.beam._distribution import Continuations, DistributionMaker, averaged, joined, nothing_foreseen
from polydraft.beam._layer import ForestLayer, grow_forest
from polydraft.beam._node import TRUSTED, Beam, Hypothesis, Node, Pool, Stops, Twins, common_path
from polydraft.beam._reader import TreeReader, tree_reader
from polydraft.beam._slots import Reading, SlotTree
from polydraft.beam._workspace import BeamWorkspace
from polydraft.beam.options import BeamOptions, Draws
from polydraft.engine import Stats, StopReason
from polydraft.errors import FailureError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.sampling import SamplingParams

_FEW_NODES = 16
"""On a CPU in single precision, logits of so many nodes are computed together; of more, only where they are asked for."""

_NEWS = 0.2
"""Weight of the last round in that running mean."""

_MOST_DISTRIBUTIONS = 512
"""Short distributions of the target that stay on the host for texts that end alike."""


@dataclass(frozen=True, eq=False)
class _Launched:
    """A target pass under way."""

    layers: list[ForestLayer]
    nodes: list[Node]
    replayed: int
    """How many passes were replayed from a capture."""


class BeamRun(ABC):
    """Rounds of draft forest, one target pass, and as many steps of beam decoding as that pass allows.

    Parameters
    ----------
    draft : LanguageModel or FeatureHead, optional
        Without one every round is one step: the baseline. Unless `options.twins` is set, which does without one.
    stops : Stops, optional
        Stop strings, none if not given.
    workspace : BeamWorkspace, optional
        Memories of target and draft that nobody works on; new ones otherwise.
    """

    def __init__(
        self,
        *,
        target: LanguageModel,
        draft: LanguageModel | FeatureHead | None,
        prompt: Sequence[int],
        params: SamplingParams,
        options: BeamOptions,
        eos_token_ids: frozenset[int],
        max_new_tokens: int,
        stops: Stops | None = None,
        workspace: BeamWorkspace | None = None,
    ) -> None:
        self.target, self.options, self.stops = target, options, stops or Stops()
        self.stats = Stats()
        self._started = time.perf_counter()
        self._eos = eos_token_ids
        self._longest, self._end_reason = max_new_tokens, StopReason.LENGTH
        if target.max_positions is not None and len(prompt) + max_new_tokens > target.max_positions:
            self._longest, self._end_reason = target.max_positions - len(prompt), StopReason.CONTEXT
        self.pool = Pool(options.beams, options.length_penalty, options.early_stopping, self._longest)
        root = Node(prompt[-1])
        self.beams = [Beam(root, 0.0)]
        """Beams that go on; they all have the same length."""
        if options.twins:
            draft = None
        self.draft_name = "twins" if options.twins else None if draft is None else draft.name
        """Who drafts, if anyone."""
        self._workspace = workspace or BeamWorkspace(target, draft, graphs=False)
        self._workspace.claim = weakref.ref(self)
        with self.stats.clock("prefill"):
            self._workspace.begin(len(prompt), len(prompt) + self._longest)
        self.reader: TreeReader | None = tree_reader(draft, self._workspace.draft_memory) if draft is not None else None
        self.distribution = self._distribution_maker(params, prompt, None)
        self.draft_distribution = self._distribution_maker(params, prompt, self.reader)
        self.pass_of_step: list[int] = []
        """Which target pass made each step certain."""
        self._reach = float(options.depth_of_drafts)
        """Layers that a round accepts, as a running mean."""
        self._cancelled = False
        self._launched: _Launched | None = None
        self._logit_rows: dict[Node, int] = {}
        self._logits_RV: Tensor | None = None
        """Logits of the nodes above, where those of the last pass were computed together."""
        self._distributions: dict[Node, tuple[Continuations, int]] = {}
        """The target's distributions that are on the host: of beams that go on, and of the last few hundred if short."""
        self._twins = Twins(prompt)
        with torch.inference_mode(), self.stats.clock("prefill"), self._workspace.at_work():
            memory = self._workspace.target_memory
            memory.context.prefill(
                [prompt[:-1]], self.reader.observe if self.reader is not None and self.reader.reads_features else None
            )
            self.tree = SlotTree(memory.context, memory.bank, graphs=memory.graphs)
            self.tree.reading = self._distribution_reading(self.distribution, target.head)
            if self.reader is not None:
                self.reader.begin(prompt, root, self.tree)
                self.reader.tree.reading = self._distribution_reading(self.draft_distribution, self.reader.head)

    def _distribution_maker(
        self, params: SamplingParams, prompt: Sequence[int], reader: TreeReader | None
    ) -> DistributionMaker:
        """Make the distribution of the target, or of a draft."""
        return DistributionMaker(
            params,
            prompt,
            self.target.vocab_size,
            self.target.device,
            vocabulary=None if reader is None else reader.vocabulary,
            best=self._best(reader),
            draft=None if reader is None else reader.name,
        )

    def _distribution_reading(self, distribution: DistributionMaker, head: Callable[[Tensor], Tensor]) -> Reading | None:
        """Have passes compute the distributions of all their nodes."""
        if not (self._distributions_together and distribution.is_packed):
            return None
        return Reading(distribution.kind, lambda features_TF: distribution.packed(head(features_TF)))

    @property
    def _distributions_together(self) -> bool:
        """Whether short distributions come with the pass: where each copy to the host has to wait for the device."""
        return self.target.device.type != "cpu"

    @abstractmethod
    def _best(self, reader: TreeReader | None) -> int | None:
        """How many of a text's best continuations matter; None for all of them."""

    @property
    def _candidates(self) -> int:
        """Continuations looked at in each step, by Hugging Face's rule: enough that W of them go on whichever end by a token.

        Stop strings may end more of them. Then fewer than W beams go on, and where all end, none.
        """
        return max(2, 1 + len(self._eos)) * self.options.beams

    @property
    def _width(self) -> int:
        """Draws of a step of fixed width."""
        return self._candidates if self.options.draws == Draws.HUGGING_FACE else self.options.beams

    @abstractmethod
    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        """Return which continuations become draft beams, in order."""

    def _grow(self, depth: int) -> list[ForestLayer]:
        """Let the draft run ahead."""
        return grow_forest(self.beams, depth, self._draft_rows, self._ends, self._choose_drafts)

    @abstractmethod
    def _verify(self, layers: list[ForestLayer]) -> int:
        """Take as many steps as the target's pass allows, and return their number."""

    @property
    def done(self) -> bool:
        """Whether no beam goes on."""
        return not self.beams or self._cancelled

    @property
    def length(self) -> int:
        """New tokens of each running beam."""
        return len(self.pass_of_step)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one round. Where distributions come with the pass, the next one is under way when this returns."""
        if self._workspace.spoiled:
            raise FailureError("a round of these beams was interrupted and its state is unknown; start the request again")
        with self._workspace.at_work():
            launched, self._launched = self._launched or self._launch(), None
            self._decide(launched)
            if not self.done:
                if self._runs_ahead:
                    self._launched = self._launch()
                self._tidy()

    @property
    def _runs_ahead(self) -> bool:
        """Whether a pass is worth launching before the last one's tokens are handed out: where nobody waits for it yet."""
        return self.tree.reading is not None

    def _launch(self) -> _Launched:
        """Let the draft run ahead, and the target begin to pass its forest."""
        with self.stats.clock("draft"):
            depth = self._depth() if self._drafts else 0
            layers = self._grow(depth) if depth > 0 else []
        with self.stats.clock("target"):
            nodes = [beam.node for beam in self.beams]
            # Nothing follows a text that has ended: no step will ask for its distribution.
            nodes += [beam.node for layer in layers for beam in layer.beams if not self._ends(beam.node)]
            nodes = list(dict.fromkeys(nodes))
            replayed = self.tree.replayed_passes
            self.tree.read(nodes)
        return _Launched(layers, nodes, self.tree.replayed_passes - replayed)

    def _decide(self, launched: _Launched) -> None:
        """Take the steps that the target's pass allows."""
        stats, layers = self.stats, launched.layers
        with stats.clock("target"):
            if self._drafts:
                self._twins.note(launched.nodes)
            self._prepare(launched.nodes)
        with stats.clock("verify"):
            steps = self._verify(layers)
        if layers:
            # A forest accepted to its end might have gone on.
            found = steps - 1 + (steps > len(layers))
            self._reach += _NEWS * (found - self._reach)
        stats.count(steps - 1, min(steps, len(layers)))
        stats.rounds += 1
        stats.replayed_rounds += launched.replayed
        stats.total_seconds = time.perf_counter() - self._started

    def _tidy(self) -> None:
        """Let go what no beam needs, while the device works on the next pass if there is one under way."""
        with self.stats.clock("commit"):
            leaves, below = [beam.node for beam in self.beams], [] if self._launched is None else self._launched.nodes
            self.tree.keep(leaves, below)
            self.stops.keep([*leaves, *below, *(one.node for one in self.pool.best)])
            if self.reader is not None:
                self.reader.keep(leaves, below)

    @property
    def _drafts(self) -> bool:
        return self.draft_name is not None

    def _depth(self) -> int:
        """Layers worth drafting: one more than rounds of late have accepted, which looks at the past alone."""
        room = self._longest - self.length - 1
        return min(self.options.depth_of_drafts, int(self._reach + 1.5), room)

    def _prepare(self, nodes: Sequence[Node]) -> None:
        """Compute the logits of all nodes of the pass together, where that costs little more than those of a few."""
        many = _MOST_DISTRIBUTIONS if self._drafts and self.distribution.is_short else 0
        if len(self._distributions) > 2 * many:
            held = {beam.node: self._distributions[beam.node] for beam in self.beams if beam.node in self._distributions}
            self._distributions = dict(list(self._distributions.items())[len(self._distributions) - many :]) | held
        nodes = [node for node in nodes if node not in self._distributions]
        self._logit_rows, self._logits_RV = {}, None
        if not nodes:
            return
        if self.tree.reading is not None:
            self._note_distributions(nodes)
            return
        features_RF = self.tree.features(nodes)
        half = features_RF.dtype in (torch.bfloat16, torch.float16)
        if half or len(nodes) <= _FEW_NODES:
            self._logits_RV = self.target.head(features_RF)
            self._logit_rows = {node: row for row, node in enumerate(nodes)}

    def _note_distributions(self, nodes: Sequence[Node]) -> None:
        """Compute the target's distribution after each node, to be had by `_rows`."""
        packed_RX = self.tree.readings(nodes)
        distribution = (
            self.distribution(self._logits(nodes), nodes)
            if packed_RX is None
            else self.distribution.unpacked(packed_RX, nodes, self._logits)
        )
        self._distributions.update({node: (distribution, row) for row, node in enumerate(nodes)})

    def _logits(self, nodes: Sequence[Node]) -> Tensor:
        if self._logits_RV is None or any(node not in self._logit_rows for node in nodes):
            return self.target.head(self.tree.features(nodes))
        rows = [self._logit_rows[node] for node in nodes]
        return self._logits_RV if rows == list(range(len(self._logits_RV))) else self._logits_RV[rows]

    def _pieces(self, nodes: Iterable[Node]) -> list[tuple[Continuations, int]]:
        """Return where the target's distribution after each node stands."""
        # One text may be several beams: independent ones can be alike.
        missing = list(dict.fromkeys(node for node in nodes if node not in self._distributions))
        if missing:
            self._note_distributions(missing)
        return [self._distributions[node] for node in nodes]

    def _rows(self, nodes: Sequence[Node]) -> Continuations:
        """Return the target's distribution after each node."""
        return joined(self._pieces(nodes))

    def _draft_rows(self, nodes: list[Node]) -> Continuations:
        """Return the draft's distribution after each node; where the target has passed one already, its own: the best draft.

        Some input beams lie inside the last round's forest: what follows them needs no guess. For the others the target's
        distribution after a text that ends alike stands in for the draft's, or beside it.
        """
        certain: dict[int, Node] = {}
        hints: dict[int, Node] = {}
        for index, node in enumerate(nodes):
            twin, shared = self._passed_like(node)
            if twin is not None:
                (certain if shared >= TRUSTED else hints)[index] = twin
        pieces = dict(zip(certain, self._pieces(certain.values()), strict=True))
        guessed = [index for index in range(len(nodes)) if index not in certain]
        if guessed:
            distribution = self._guess([nodes[index] for index in guessed])
            if hints:
                distribution = averaged(
                    distribution, self._rows(list(hints.values())), [guessed.index(index) for index in hints]
                )
            pieces |= {index: (distribution, row) for row, index in enumerate(guessed)}
        return joined([pieces[index] for index in range(len(nodes))])

    def _guess(self, nodes: Sequence[Node]) -> Continuations:
        """Return the draft's own distribution after each node."""
        if self.reader is None:
            return nothing_foreseen(len(nodes), self.target.vocab_size)
        self.reader.read(nodes)
        packed_RX = self.reader.tree.readings(nodes)
        if packed_RX is None:
            return self.draft_distribution(self.reader.logits(nodes), nodes)
        return self.draft_distribution.unpacked(packed_RX, nodes, self.reader.logits)

    def _passed_like(self, node: Node) -> tuple[Node | None, int]:
        """Return the node whose target distribution can stand for this one's, and how many last tokens the two texts share."""
        passed = self.tree.bank.rows
        if node in passed and self._has_distribution(node):
            return node, TRUSTED
        for twin, shared in self._twins.of(node):
            # Long distributions take longer to average than a hint is worth.
            useful = (twin in self._distributions or twin in passed) and (shared >= TRUSTED or self.distribution.is_short)
            if useful and self._has_distribution(twin):
                return twin, shared
        return None, 0

    def _has_distribution(self, node: Node) -> bool:
        """Whether there is a distribution of the target after a node that it has passed."""
        if node in self._distributions or not self.distribution.has_processors:
            return True
        try:
            self._note_distributions([node])
        except Exception:  # of a text that no beam can become, or that will be asked about again when one does
            return False
        return True

    def _child(self, beams: Sequence[Beam], continuations: Continuations, entry: int, total: float) -> Beam:
        """Continue a beam."""
        node = beams[int(continuations.rows_X[entry])].node.child(int(continuations.tokens_X[entry]))
        node.log_prob = float(continuations.log_probs_X[entry])
        return Beam(node, total)

    def _finish_step(self, running: Sequence[Beam], ended: Sequence[Beam]) -> None:
        """Close a step: beams that ended go to the pool, the others on, unless the pool says that it is enough."""
        length = self.length + 1
        for beam in ended:
            self.pool.add(beam.node, beam.score, self._reason(beam.node))
        self.pass_of_step.append(self.stats.rounds)
        if not running and not self.pool.best:
            culprit = (
                f"logits processor {self.distribution.emptied_by!r}"
                if self.distribution.emptied_by
                else "the sampling settings"
            )
            raise FailureError(
                f"{culprit} left no beam a token to continue with after {self.length} new tokens; leave at least one with a "
                "finite score"
            )
        best = max((beam.score for beam in running), default=float("-inf"))
        enough = not running or self.pool.is_done(best, length)
        self.beams = [] if enough else list(running)

    def _ends(self, node: Node) -> bool:
        """Whether a text ends with this node."""
        return node.token in self._eos or node.depth >= self._longest or self.stops.found(node)

    def _reason(self, node: Node) -> StopReason:
        """Why a text ends with this node, if it does."""
        if node.token in self._eos:
            return StopReason.EOS
        return StopReason.STOP if self.stops.found(node) else self._end_reason

    def settled(self) -> list[Node]:
        """Return the beginning that all texts share which can still come out first."""
        return common_path([beam.node for beam in self.beams] + [one.node for one in self.pool.best])

    def cancel(self) -> None:
        """End here: running beams count as finished."""
        if not self.done:
            for beam in self.beams:
                if beam.node.depth:
                    self.pool.add(beam.node, beam.score, StopReason.CANCELLED)
        self._cancelled = True

    def results(self) -> list[Hypothesis]:
        """Return the finished texts, best first."""
        return self.pool.best[: self.options.num_return_sequences]
