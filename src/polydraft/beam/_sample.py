"""Beam sampling, speculatively (DSBD): beams of the target's own beam distribution from forests that the draft samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from polydraft.beam._distribution import Continuations, Floats, Indices, normalised
from polydraft.beam._layer import Chance, ForestLayer, LayerVerdict, close_draws, dynamic_width, verify_layer
from polydraft.beam._node import Beam
from polydraft.beam._reader import TreeReader
from polydraft.beam._run import BeamRun
from polydraft.beam.options import Draws

_FEW_ENTRIES = 4096


class SampleRun(BeamRun):
    """Beam sampling; a layer of the draft's forest that yields enough beams is a step without a pass of its own.

    Notes
    -----
    Algorithm 1 of the paper, see `verify_layer` for what had to be corrected. With a fixed width the beams follow the
    distribution of plain beam sampling exactly. With a width threshold each layer's beams follow the beam distribution given
    its width, which depends on earlier layers only; the distribution of whole texts is then another than that of any fixed
    width.
    """

    def __init__(self, *, chance: Chance, **parts: Any) -> None:
        self._chance = chance
        super().__init__(**parts)

    def _best(self, reader: TreeReader | None) -> int | None:
        return None

    @property
    def _distinct(self) -> bool:
        return self.options.draws != Draws.INDEPENDENT

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        probs_X = normalised(continuations.totals([beam.score for beam in parents]))
        return self._chance.draw(probs_X, self.options.draft_width or 2 * self._width, distinct=self._distinct)

    def _verify(self, layers: list[ForestLayer]) -> int:
        sources: list[int] | None = list(range(len(self.beams)))
        for steps, layer in enumerate(layers, start=1):
            assert sources is not None
            sources = self._verify_layer(layer, sources)
            if not self.beams or sources is None:
                self._narrow()
                return steps
        continuations = self._rows([beam.node for beam in self.beams])
        totals_X = continuations.totals([beam.score for beam in self.beams])
        drawn = self._chance.draw(normalised(totals_X), self._width, distinct=self._distinct)
        self._close([self._child(self.beams, continuations, entry, float(totals_X[entry])) for entry in drawn])
        self._narrow()
        return len(layers) + 1

    def _verify_layer(self, layer: ForestLayer, sources: Sequence[int]) -> list[int] | None:
        """Take one step by a layer whose parents number `sources` are the running beams.

        Returns
        -------
        list of int, or None
            Which parents of the next layer the running beams are; None where verification ends.
        """
        continuations = self._rows([beam.node for beam in self.beams])
        totals_X = continuations.totals([beam.score for beam in self.beams])
        surviving, entries_X = layer.continuations.restricted(sources)
        universe = _Universe(continuations, surviving)
        target_probs_U = universe.spread_target(normalised(totals_X))
        drafted_X = normalised(surviving.totals([layer.parents[source].score for source in sources]))
        draft_probs_U = universe.spread_draft(drafted_X)
        drafts, numbers = [], []
        for number, entry in enumerate(layer.drawn):
            index = _position(entries_X, entry)
            if index is not None:  # otherwise an orphan: its parent was rejected
                drafts.append(int(universe.draft_U[index]))
                numbers.append(number)
        verdict = verify_layer(
            target_probs_U,
            draft_probs_U,
            drafts,
            self._layer_width(target_probs_U, draft_probs_U, len(drafts)),
            self._chance,
            distinct=self._distinct,
        )
        return self._take_layer(layer, continuations, totals_X, universe, verdict, numbers)

    def _layer_width(self, target_probs_U: Floats, draft_probs_U: Floats, drafts: int) -> int:
        threshold = self.options.width_threshold
        if threshold is None or not drafts:  # nothing to go by: as wide as a layer that no draft reached
            return self._width
        return dynamic_width(target_probs_U, draft_probs_U, drafts, threshold=threshold, least=self.options.min_width or 1)

    def _take_layer(
        self,
        layer: ForestLayer,
        continuations: Continuations,
        totals_X: Floats,
        universe: "_Universe",
        verdict: LayerVerdict,
        numbers: Sequence[int],
    ) -> list[int] | None:
        """Turn a verdict into beams."""
        entries = [universe.target_entry(output) for output in verdict.outputs]
        beams = [self._child(self.beams, continuations, entry, float(totals_X[entry])) for entry in entries]
        for beam in beams[: len(verdict.drafts)]:
            beam.node.drafted = True
        unfinished = [number for number, beam in enumerate(layer.beams) if not self._ends(beam.node)]
        row_of = {number: row for row, number in enumerate(unfinished)}
        rows = {id(beam): row_of.get(numbers[draft]) for beam, draft in zip(beams, verdict.drafts, strict=False)}
        self._close(beams)
        if not verdict.complete:
            return None
        found = [rows.get(id(beam)) for beam in self.beams]
        return [row for row in found if row is not None]

    def _close(self, drawn: Sequence[Beam]) -> None:
        """End a step with these draws."""
        self._finish_step(*close_draws(drawn, self.options, self._ends))

    def _narrow(self) -> None:
        """With one cache, go on with the beam of lowest perplexity alone; all are equally long."""
        if self.options.one_cache and self.beams:
            self.beams = [max(self.beams, key=lambda beam: beam.score)]


def _position(sorted_X: Indices, entry: int) -> int | None:
    index = int(np.searchsorted(sorted_X, entry))
    return index if index < len(sorted_X) and sorted_X[index] == entry else None


class _Universe:
    """All continuations that target or draft give mass, in one numbering."""

    def __init__(self, target: Continuations, draft: Continuations) -> None:
        self._target_U, self.draft_U = target.keys(), draft.keys()
        self._size = target.num_rows * target.vocab_size
        if len(self._target_U) < _FEW_ENTRIES:  # truncated distributions: leave out what neither gives mass
            keys = np.union1d(self._target_U, self.draft_U)
            self._target_U, self.draft_U = np.searchsorted(keys, self._target_U), np.searchsorted(keys, self.draft_U)
            self._size = len(keys)
        self._entry_of = np.full(self._size, -1)
        self._entry_of[self._target_U] = np.arange(len(self._target_U))

    def spread_target(self, probs_X: Floats) -> Floats:
        """Return the target's distribution over the universe."""
        return self._spread(self._target_U, probs_X)

    def spread_draft(self, probs_X: Floats) -> Floats:
        """Return the draft's distribution over the universe."""
        return self._spread(self.draft_U, probs_X)

    def target_entry(self, output: int) -> int:
        """Return the target's number of an entry that it gives mass."""
        entry = int(self._entry_of[output])
        assert entry >= 0, "an output without mass"
        return entry

    def _spread(self, places_X: Indices, probs_X: Floats) -> Floats:
        spread_U = np.zeros(self._size)
        spread_U[places_X] = probs_X
        return spread_U
