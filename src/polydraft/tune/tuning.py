"""`polydraft tune`: a contest for each temperature and batch size, and the profile with their winners."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, product, starmap
from pathlib import Path
from typing import NamedTuple

from polydraft.defaults import NONE, default_draft
from polydraft.engine import Decoder
from polydraft.loading import make_decoder, resolved
from polydraft.models import check_prompts
from polydraft.models.loading import load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.options import LoadOptions
from polydraft.profile import Pick, Profile, origin_of, profile_file
from polydraft.prompts import load_prompts
from polydraft.sampling import SamplingParams
from polydraft.tune import TuneOptions
from polydraft.tune.contest import Candidate, Lap, hold_contest, planned_turns, winner

_MOST_PROMPTS = 64
_STATIC = ("chain:2", "chain:4", "2x1x1", "4x2x1", "4x2x2x1x1")
_DYNAMIC = {"cpu": ("dynamic:8", "dynamic:64"), "cuda": ("dynamic:32:6:fixed", "dynamic:64:7:fixed")}
"""On a GPU only for single texts: batches of them have static trees (decision 41)."""
_NGRAMS = ("lookup", "suffix")

Observer = Callable[[str, int, int, str], None]
"""Called with `(phase, done, total, note)`."""


class Use(NamedTuple):
    """The use that a setting is tuned for."""

    temperature: float
    batch: int


@dataclass(frozen=True, kw_only=True)
class Result(Pick):
    """How fast one candidate was in one contest."""

    low: float
    high: float
    """95 % interval of the speed-up."""
    tokens_per_second: float
    tokens_per_pass: float
    laps: int
    """Batches of prompts that it decoded until it dropped out or the contest ended."""
    picked: bool


class Tuning:
    """Times the candidates of a pair on this machine."""

    def __init__(self, options: TuneOptions, observer: Observer | None = None) -> None:
        self.options, self._observer = options, observer or (lambda *_: None)
        self.draft_name = default_draft(options.target, options.draft)
        self._place = resolve_device(options.device)
        self._format = resolve_dtype(options.dtype, self._place)
        texts = load_prompts(options.source, _MOST_PROMPTS)
        self._loaded = load_model(options.target, self._place, self._format, None, options.native)
        self._draft = load_draft(self.draft_name, self._loaded)
        model = self._loaded.model
        encoder = Decoder(model, tokenizer=self._loaded.tokenizer)
        self._prompts = [encoder.encode(one.content, chat=not options.raw) for one in texts]
        check_prompts(self._prompts, model.max_positions, model.vocab_size)
        self.results: list[Result] = []
        """Results of all contests; in each, plain decoding comes first, then the others by speed."""

    def run(self) -> list[Result]:
        """Hold all contests and return the best setting for each temperature and batch size."""
        uses = list(starmap(Use, product(self.options.temperatures, self.options.batch_sizes)))
        for number, use in enumerate(uses):
            self.results += self._contest(use, number, len(uses))
        self._observer("tuning", 100, 100, "")
        return [one for one in self.results if one.picked]

    @property
    def file(self) -> Path:
        """Where `load` looks for the profile."""
        return profile_file(self.options.target, self.draft_name, self._place, self._format)

    def profile(self, picks: Sequence[Pick]) -> Profile:
        """Return a profile with the picks, their figures, and the machine, models and version that they apply to."""
        options = LoadOptions(self.options.target, self.draft_name, native=self.options.native)
        figures = {"made": time.strftime("%Y-%m-%d"), "results": [asdict(one) for one in self.results]}
        return Profile(origin=origin_of(options, self.draft_name, self._place, self._format), picks=picks, figures=figures)

    def _contest(self, use: Use, number: int, count: int) -> list[Result]:
        """Hold contest `number` of `count`. Preparing the candidates does not count towards its time."""
        asked, columns = self.options, None if self._draft is None else self._draft.num_columns
        untuned = LoadOptions(asked.target, self.draft_name, device=asked.device, dtype=asked.dtype, profile=NONE)
        plain, *rivals = entered = usual_candidates(use, self._place.type, resolved(untuned).tree, columns)
        steps, seconds = len(entered) + planned_turns(len(rivals)), 60 * self.options.minutes / count
        done, began = 0, math.inf

        def tell(note: str) -> None:
            """Report progress by work or by time, whichever is closer to the end."""
            nonlocal done
            share = min(max(done / steps, (time.monotonic() - began) / seconds), 1.0)
            where = f"T={use.temperature:g}, batch size {use.batch}"
            self._observer("tuning", int(99 * (number + share) / count), 100, f"{where}: {note}")
            done += 1

        sampling, most = SamplingParams(temperature=use.temperature), self.options.max_new_tokens
        longest = max(map(len, self._prompts)) + most + 1
        decoders = {}
        for one in entered:
            tell(f"preparing {one.name}")
            # Drafting pauses while it does not pay, as it will in a decoder that `load` makes from the profile.
            options = LoadOptions(tree=one.tree, drafter=one.drafter)
            decoders[one] = make_decoder(options, self._loaded, self._draft, pauses=True)
            decoders[one].warm_up(sampling=sampling, batch_size=use.batch, longest=longest)

        def run(one: Candidate, lap: int) -> Lap:
            tell(f"timing {one.name}")
            prompts = list(islice(cycle(self._prompts), lap * use.batch, (lap + 1) * use.batch))
            stats = decoders[one].generate(prompts, sampling=sampling, max_new_tokens=most)[0].stats
            return Lap(stats.new_tokens, stats.decode_seconds, stats.passes)

        began = time.monotonic()
        best = winner(plain, hold_contest(plain, rivals, run, lambda: time.monotonic() - began > seconds))
        ranked = sorted(rivals, key=lambda one: (-len(one.laps), -one.rate))
        return [_result(use, one, plain, picked=one is best) for one in (plain, *ranked)]


def usual_candidates(use: Use, device: str, default: str, columns: int | None) -> list[Candidate]:
    """Return plain decoding and its rivals: the default and other trees, or n-grams without a draft."""
    plain = Candidate("plain decoding")
    if columns is None:
        return [plain, *(Candidate(drafter, drafter=drafter) for drafter in _NGRAMS)]
    trees = (default, *(_DYNAMIC[device] if device == "cpu" or use.batch == 1 else ()), *_STATIC)
    fitting = [tree for tree in trees if LoadOptions(tree=tree).shape[1].max_children <= columns]
    return [plain, *(Candidate(tree, tree) for tree in dict.fromkeys(fitting))]


def _result(use: Use, candidate: Candidate, plain: Candidate, *, picked: bool) -> Result:
    speedup, low, high = (round(value, 3) for value in candidate.speedup(plain))
    per_second, per_pass = round(candidate.rate, 2), round(candidate.tokens_per_pass, 3)
    return Result(
        **use._asdict(), tree=candidate.tree, drafter=candidate.drafter, speedup=speedup, low=low, high=high,
        tokens_per_second=per_second, tokens_per_pass=per_pass, laps=len(candidate.laps), picked=picked,
    )  # fmt: skip
