"""From prompts to a profile: run probes, fit costs, rate every choice, run the best few, pick."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polydraft.defaults import default_draft
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.loading import make_decoder
from polydraft.models import FeatureHead, LanguageModel, check_prompts
from polydraft.models.loading import Loaded, load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.options import AUTO, LoadOptions
from polydraft.profile import Pick, Profile, origin_of, profile_file
from polydraft.prompts import load_prompts
from polydraft.sampling import SamplingParams
from polydraft.trees import Topology, parse_dynamic, parse_tree
from polydraft.tune.acceptance import PROBES, Acceptance, shapes, spelled
from polydraft.tune.hardware import PredictedRounds, parse_gpu, size_named, size_of
from polydraft.tune.model import MeasuredRounds, RoundModel, costs_at
from polydraft.tune.options import TuneOptions
from polydraft.tune.rounds import Rounds, Run, Use, in_batches, pass_seconds

_PROBE_BATCH = 8
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_ROUNDS, _TURNS = 8, 2
"""Of each setting whose rounds are timed and nothing else; settings take turns, as machines are not always equally fast."""
_TIMED = ("none", "chain:1", "4", "chain:4", "2x2x2", "2x1x1x1", "4x2x2x1x1")
_MOST_TOKENS = {"cpu": 320, "cuda": 2048}
"""Of a round that is only timed: larger ones take long and teach nothing new, as passes cost by their tokens there."""
_LISTED = ((1,), (1,) * 2, (1,) * 3, (1,) * 5, (4, 2, 1), (4, 2, 2, 1, 1))
_MOST_NODES = 64
_DYNAMIC = ("dynamic:8", "dynamic:64")
_DEFAULT = ("dynamic:32:6:fixed", "dynamic:64:7:fixed")
"""At temperature 0 on a GPU, where one of them is what a pair has that was never tuned."""
_NGRAMS = ("lookup", "suffix")
_UNION = "lookup+model"

Observer = Callable[[str, int, int, str], None]
"""Told how much is done, of how much in all, and what is being done."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One setting, with what it is expected to give, and what it gave."""

    kind: str
    """plain, chain, static tree, dynamic tree, n-grams, or union."""
    tree: str
    drafter: str = AUTO
    temperature: float
    tokens: float
    """Per pass."""
    nodes: float
    expected: Mapping[int, float]
    """Speed-up over plain decoding, by batch."""
    measured: Mapping[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How users would ask for it, in a word or two."""
        return self.tree if self.drafter == AUTO else self.drafter if self.tree == "none" else f"{self.drafter} {self.tree}"


class Tuning:
    """Rate the choices that a pair has on a machine.

    Parameters
    ----------
    options : TuneOptions
    observer : callable, optional
        For progress.
    loaded, draft : optional
        Models that are there already.
    """

    def __init__(
        self,
        options: TuneOptions,
        observer: Observer | None = None,
        *,
        loaded: Loaded | None = None,
        draft: LanguageModel | FeatureHead | None = None,
    ) -> None:
        self.options, self._observer = options, observer or (lambda *_: None)
        self._done = self._total = 0
        """Work, in rounds, or on a CPU in rounds of one row: what took place and what there is."""
        self.draft_name = default_draft(options.target) if options.draft == AUTO else options.draft
        self._place = resolve_device(options.device)
        self._format = resolve_dtype(options.dtype, self._place)
        texts = load_prompts(options.source, options.limit)
        if loaded is None:
            loaded = load_model(options.target, self._place, self._format, options.device_map, options.native)
            draft = load_draft(self.draft_name, loaded)
        self._loaded, self._draft = loaded, draft
        encoder = Decoder(loaded.model, tokenizer=loaded.tokenizer)
        self._prompts = [encoder.encode(one.content, chat=not options.raw) for one in texts]
        check_prompts(self._prompts, loaded.model.max_positions, loaded.model.vocab_size)
        self.choices: list[Choice] = []
        """Of all temperatures."""
        self.figures: dict[str, Any] = {}
        """What was measured, by temperature."""

    def run(self) -> list[Pick]:
        """Rate all choices, run the best few, and return the best of every use."""
        picks: list[Pick] = []
        tokens, seed = self.options.max_new_tokens, self.options.seed
        uses = [Use(temperature=one, max_new_tokens=tokens, seed=seed) for one in dict.fromkeys(self.options.temperatures)]
        self._total = sum(map(self._planned, uses))
        for use in uses:
            rated = self._rated(use)
            if self.options.predict is None and self.options.check:
                rated = self._checked(rated, use)
            self.choices += rated
            picks += [_pick(rated, batch) for batch in dict.fromkeys(self.options.batches)]
        self._observer("tuning", self._total, self._total, "")
        return picks

    def _planned(self, use: Use) -> int:
        """Return the work at one temperature; of choices that are run to check, at most as many as there may be."""
        options, parts = self.options, {batch: len(in_batches(self._prompts, batch)) for batch in self._batches}
        others = len(_NGRAMS) + (0 if self._draft is None else len(self._default(use)) + len(_DYNAMIC) + 1)
        whole = {batch: parts[batch] * self._work(use.max_new_tokens, batch) for batch in parts}
        work = (1 + others) * whole[options.checked_batch]
        if self._draft is not None:
            work += len(self._widths) * whole[self._probe_batch]
        if options.predict is None:
            timed = sum(len(self._timed_trees(rows)) * self._work(_ROUNDS, rows) for rows in self._timed_batches)
            static = 0 if self._draft is None else len(_LISTED) + len(options.batches)
            checks = (1 + min(options.check, others + static)) if options.check else 0
            work += _TURNS * timed + checks * sum(whole[batch] for batch in self._checked_batches)
        return work

    def _work(self, rounds: int, rows: int) -> int:
        return rounds * (rows if self._place.type == "cpu" else 1)

    def _tell(self, use: Use, what: str, rounds: int, rows: int) -> None:
        """Say what begins now."""
        self._observer("tuning", min(self._done, self._total), self._total, f"T={use.temperature:g}: {what}")
        self._done += self._work(rounds, rows)

    @property
    def _probe_batch(self) -> int:
        """Texts at a time where acceptance is counted, which any number of them shows: no more than anybody asked for."""
        return min(_PROBE_BATCH, len(self._prompts), max(self.options.batches))

    @property
    def _widths(self) -> list[int]:
        """Children per node of the probes."""
        return [] if self._draft is None else [width for width in PROBES if width <= self._draft.num_columns]

    @property
    def _timed_batches(self) -> list[int]:
        """Batches whose rounds are timed: the smallest and the largest that were asked for, and one between them."""
        asked = {*self.options.batches, self.options.checked_batch}
        between = {self._probe_batch} if min(asked) < self._probe_batch < max(asked) else set()
        return sorted({min(asked), max(asked), self.options.checked_batch} | between)

    @property
    def _checked_batches(self) -> list[int]:
        """Batches that the best few are run at: all of them on a GPU, where that takes seconds."""
        return sorted({self.options.checked_batch, *(self.options.batches if self._place.type == "cuda" else ())})

    @property
    def _batches(self) -> list[int]:
        return sorted({*self.options.batches, self.options.checked_batch, self._probe_batch})

    @property
    def file(self) -> Path:
        """Where the profile is looked for."""
        return profile_file(self.options.target, self.draft_name, self._place, self._format)

    def profile(self, picks: Sequence[Pick]) -> Profile:
        """Return the picks with what they hold for."""
        options = LoadOptions(self.options.target, self.draft_name, native=self.options.native)
        figures = {
            "made": time.strftime("%Y-%m-%d"),
            "options": {name: value for name, value in asdict(self.options).items() if value is not None},
            "choices": [asdict(one) for one in self.choices],
            "measured": self.figures,
        }
        return Profile(origin=origin_of(options, self.draft_name, self._place, self._format), picks=picks, figures=figures)

    def _decoder(self, tree: str, drafter: str = AUTO) -> Decoder:
        return make_decoder(LoadOptions(tree=tree, drafter=drafter), self._loaded, self._draft)

    def _observed(self, tree: str, use: Use, batch: int, what: str) -> Rounds:
        """Let a static tree write all prompts."""
        run, parts = Run(self._decoder(tree), use, batch), in_batches(self._prompts, batch)
        for number, part in enumerate(parts):
            self._tell(use, what, use.max_new_tokens, batch)
            run.generate(part, first=number * batch)
        return run.rounds(robust=True)

    @cached_property
    def _passes(self) -> dict[int, float]:
        most = _MOST_TOKENS[self._place.type]
        found = pass_seconds(self._loaded.model, [size for size in _SIZES if size <= most])
        self.figures["pass seconds"] = found
        return found

    def _probed(self, use: Use) -> tuple[dict[int, Rounds], Acceptance | None]:
        """Run the probes; their rounds teach both what is accepted and what rounds of their batch take."""
        if self._draft is None:
            return {}, None
        batch = self._probe_batch
        seen = {
            width: self._observed(spelled(PROBES[width]), use, batch, f"acceptance of {width} per node")
            for width in self._widths
        }
        found = Acceptance.counted({width: (one.accepts, one.offers) for width, one in seen.items()})
        self.figures[f"acceptance at T={use.temperature:g}"] = {str(width): list(one) for width, one in found.by_width.items()}
        return seen, found

    def _model(self, use: Use, probes: Mapping[int, Rounds]) -> RoundModel:
        """Return what rounds take: reckoned for other hardware, fitted to rounds of a few batches here."""
        options, target = self.options, self._loaded.model
        if options.predict is not None:
            draft = None if self._draft is None else size_of(self._draft)
            size = size_of(target) if options.size is None else size_named(options.size, target.vocab_size)
            if options.size is not None and self._draft is not None:
                draft = size_named(options.size, self._draft.num_columns, layers=1)
            return PredictedRounds(gpu=parse_gpu(options.predict), target=size, draft=draft)
        seen = [one for one in probes.values() if one.batch in self._timed_batches]
        for rows in self._timed_batches:
            runs = [Run(self._decoder(tree), use, rows) for tree in self._timed_trees(rows)]
            for _ in range(_TURNS):
                for run in runs:
                    self._tell(use, f"costs of rounds of {rows}", _ROUNDS, rows)
                    run.generate(self._prompts, most_rounds=_ROUNDS)
            seen += [run.rounds(robust=True) for run in runs]
        model = MeasuredRounds.fitted(self._passes, seen)
        self.figures[f"beside passes at T={use.temperature:g}"] = {str(rows): asdict(fit) for rows, fit in model.fits.items()}
        return model

    def _timed_trees(self, rows: int) -> list[str]:
        """Return the trees whose rounds are timed, of so many rows."""
        trees = ("none",) if self._draft is None else _TIMED
        fitting = [tree for tree in trees if rows * parse_tree(tree).num_nodes <= _MOST_TOKENS[self._place.type]]
        return fitting if len(fitting) > 2 else list(trees[:3])

    def _rated(self, use: Use) -> list[Choice]:
        """Return all choices at one temperature with what they are expected to give."""
        probes, acceptance = self._probed(use)
        model = self._model(use, probes)
        rated = [self._choice("plain", "none", AUTO, use, model, tokens=1.0, nodes=1.0, levels=0.0)]
        others = [("n-grams", "none", drafter, self._decoder("none", drafter)) for drafter in _NGRAMS]
        if acceptance is not None:
            rated += self._static(acceptance, use, model)
            best = max(rated[1:], key=lambda one: one.expected[self.options.batches[0]])
            others = [
                *(("dynamic tree", tree, AUTO, self._dynamic(tree, model)) for tree in (*self._default(use), *_DYNAMIC)),
                *others,
                ("union", best.tree, _UNION, self._decoder(best.tree, _UNION)),
            ]
        return rated + self._ran(others, use, model, self.options.checked_batch)

    def _default(self, use: Use) -> tuple[str, ...]:
        """Return the trees of which an untuned pair has one."""
        return _DEFAULT if self._place.type == "cuda" and use.temperature == 0 else ()

    def _dynamic(self, tree: str, model: RoundModel) -> Decoder:
        """Return a decoder with dynamic trees, which follow the costs of other hardware where these are asked for."""
        decoder, shape = self._decoder(tree), parse_dynamic(tree)
        if self.options.predict is None or self._draft is None or shape is None:
            return decoder
        return decoder.replace(drafter=TreeDrafter(self._draft, shape, costs=costs_at(model, 1)))

    def _static(self, acceptance: Acceptance, use: Use, model: RoundModel) -> list[Choice]:
        """Rate chains and trees: some that everybody knows, and the best of all for each batch."""
        assert self._draft is not None
        most = self._draft.num_columns
        all_shapes = [shape for shape in shapes(_MOST_NODES) if shape[0] <= most]
        sizes = {shape: Topology.from_widths(shape).num_nodes for shape in all_shapes}
        tokens = {shape: acceptance.tokens(shape) for shape in all_shapes}
        wanted: list[tuple[int, ...]] = [shape for shape in _LISTED if shape in sizes]
        for batch in self.options.batches:
            wanted.append(max(all_shapes, key=lambda one: tokens[one] / model.drafted(batch, sizes[one], len(one))))
        rated = []
        for shape in sorted(dict.fromkeys(wanted), key=lambda one: (set(one) != {1}, sizes[one])):
            kind = "chain" if set(shape) == {1} else "static tree"
            figures = {"tokens": tokens[shape], "nodes": float(sizes[shape]), "levels": float(len(shape))}
            rated.append(self._choice(kind, spelled(shape), AUTO, use, model, **figures))
        return rated

    def _ran(self, settings: Sequence[tuple[str, str, str, Decoder]], use: Use, model: RoundModel, batch: int) -> list[Choice]:
        """Rate what no table of acceptance can: run it, in turns with plain decoding.

        Only how its cost changes with the batch is the model's; for other hardware all of it.
        """
        plain, *others = self._turns([self._decoder("none"), *(one[3] for one in settings)], use, batch, "trying")
        rated = []
        for (kind, tree, drafter, _), run in zip(settings, others, strict=True):
            seen = run.rounds()
            levels = 0.0 if kind == "n-grams" else seen.levels if kind == "dynamic tree" else float(parse_tree(tree).depth)
            factor = 1.0
            if self.options.predict is None:
                reckoned = model.plain(batch) / model.drafted(batch, seen.nodes, levels)
                factor = reckoned * seen.seconds / plain.rounds().seconds
            figures = {"tokens": seen.tokens, "nodes": seen.nodes, "levels": levels}
            rated.append(self._choice(kind, tree, drafter, use, model, **figures, factor=factor))
        return rated

    def _turns(self, decoders: Sequence[Decoder], use: Use, batch: int, what: str) -> list[Run]:
        """Let settings write all prompts, batch by batch in turns, so that a slow minute hits all of them."""
        self._tell(use, f"getting ready for {batch} at a time", 0, batch)
        for decoder in decoders:
            if self._place.type == "cuda":  # captures are of lengths, and one that is made while it counts takes a second
                longest = max(map(len, self._prompts)) + use.max_new_tokens + 1
                decoder.warm_up(sampling=SamplingParams(temperature=use.temperature), batch_size=batch, longest=longest)
            Run(decoder, use, batch).generate(self._prompts[:batch], most_rounds=None if self._place.type == "cuda" else 2)
        runs, parts = [Run(decoder, use, batch) for decoder in decoders], in_batches(self._prompts, batch)
        for number, part in enumerate(parts):
            for run in runs:
                self._tell(use, f"{what} {batch} at a time", use.max_new_tokens, batch)
                run.generate(part, first=number * batch)
        return runs

    def _choice(
        self,
        kind: str,
        tree: str,
        drafter: str,
        use: Use,
        model: RoundModel,
        *,
        tokens: float,
        nodes: float,
        levels: float,
        factor: float = 1.0,
    ) -> Choice:
        batches = dict.fromkeys((*self.options.batches, self.options.checked_batch))
        expected = {
            batch: tokens * model.plain(batch) / (factor * model.drafted(batch, nodes, levels)) if kind != "plain" else 1.0
            for batch in batches
        }
        return Choice(
            kind=kind, tree=tree, drafter=drafter, temperature=use.temperature, tokens=tokens, nodes=nodes, expected=expected
        )

    def _checked(self, rated: Sequence[Choice], use: Use) -> list[Choice]:
        """Run the best few."""
        for batch in self._checked_batches:
            rated = self._checked_at(batch, rated, use)
        return list(rated)

    def _checked_at(self, batch: int, rated: Sequence[Choice], use: Use) -> list[Choice]:
        """Run plain decoding and the best few in turns, batch of prompts by batch of prompts."""
        ranked = sorted((one for one in rated if one.kind != "plain"), key=lambda one: -one.expected[batch])
        chosen = [next(one for one in rated if one.kind == "plain"), *ranked[: self.options.check]]
        runs = self._turns([self._decoder(one.tree, one.drafter) for one in chosen], use, batch, "checking")
        plain = runs[0].rounds().rate
        measured = {one.name: run.rounds().rate / plain for one, run in zip(chosen, runs, strict=True)}
        return [
            replace(one, measured={**one.measured, batch: measured[one.name]}) if one.name in measured else one for one in rated
        ]


def _pick(rated: Sequence[Choice], batch: int) -> Pick:
    """Return the best of one batch: by what was measured, where some were."""
    run = [one for one in rated if batch in one.measured]
    best = max(run or rated, key=lambda one: one.measured[batch] if run else one.expected[batch])
    return Pick(
        temperature=best.temperature,
        batch=batch,
        tree=best.tree,
        drafter=best.drafter,
        expected=round(best.expected[batch], 4),
        measured=round(best.measured[batch], 4) if batch in best.measured else None,
    )
