"""From a pair of models to the table: text, laws, figures."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from polydraft.analyze.comparison import Comparison, takes, work
from polydraft.analyze.fingerprint import digest_of
from polydraft.analyze.laws import Laws
from polydraft.analyze.pair import Pair
from polydraft.analyze.row import Row
from polydraft.analyze.sample import Observer, collect
from polydraft.analyze.settings import AnalyzeSettings
from polydraft.analyze.store import LawStore
from polydraft.engine import Decoder
from polydraft.models import check_prompts
from polydraft.prompts import load_prompts
from polydraft.schemes import SCHEMES


@dataclass(frozen=True)
class SampleSize:
    """On how much the rows of one temperature rest."""

    temperature: float
    positions: int
    prompts: int


class Analysis:
    """Compare schemes with their optima on the laws of one pair of models.

    Parameters
    ----------
    settings : AnalyzeSettings
    store : LawStore, optional
        Where laws are kept for the next time; nowhere if not given.
    observer : callable, optional
        Told `(what, done, total)` while there is work.

    Notes
    -----
    As in §6 of [1]: the target answers prompts, both models' laws are taken along the answers, and acceptance is averaged
    over positions. Deviations: errors are over prompts, as positions of one answer are alike; a random part of the positions
    stands for all; acceptance is computed, not sampled, as far as `polydraft.theory` can; the optimum of drawing without
    replacement is that of drawing one after the other.

    References
    ----------
    .. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
    """

    def __init__(self, settings: AnalyzeSettings, store: LawStore | None = None, observer: Observer | None = None) -> None:
        self.settings, self._store = settings, store
        self._observer: Observer = observer or (lambda what, done, total: None)
        self._prompts = load_prompts(settings.source, settings.limit)
        self.pair = Pair(settings.target, settings.draft, settings.device, settings.dtype)
        self.sizes: list[SampleSize] = []
        """Of the temperatures done so far."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows, temperature by temperature, then by number of drafts; a scheme that cannot take as many has none."""
        settings = self.settings
        for temperature in dict.fromkeys(settings.temperatures):
            laws = self.laws(temperature)
            self.sizes.append(SampleSize(temperature, len(laws), len(set(laws.prompt_R.tolist()))))
            progress = _Steps(
                self._observer,
                f"T={temperature:g}: acceptance",
                len(laws) * work(settings.scheme_names, settings.drafts, settings.paper_bound),
            )
            comparison = Comparison(
                laws,
                temperature,
                device=self.pair.device,
                seed=settings.seed,
                paper_bound=settings.paper_bound,
                advance=progress,
            )
            for count in dict.fromkeys(settings.drafts):
                for name in settings.scheme_names:
                    if takes(SCHEMES.get(name), count):
                        yield comparison.row(name, count)

    def laws(self, temperature: float) -> Laws:
        """Return the laws at one temperature, kept ones where they are of these models, prompts and settings."""
        origin = self._origin(temperature)
        kept = self._store.load(origin) if self._store is not None and origin is not None else None
        if kept is not None:
            return kept
        laws = collect(self.settings, self.pair.target, self.pair.draft, self._encoded(), temperature, self._observer)
        # Only now are the files of a model there that had to be downloaded.
        origin = self._origin(temperature)
        if self._store is not None and origin is not None:
            self._store.save(origin, laws)
        return laws

    def _encoded(self) -> list[list[int]]:
        target = self.pair.target
        encoder = Decoder(target.model, tokenizer=target.tokenizer)
        prompts = [encoder.encode(prompt.text, chat=not self.settings.raw) for prompt in self._prompts]
        check_prompts(prompts, target.model.max_positions, target.model.vocab_size)
        return prompts

    def _origin(self, temperature: float) -> dict[str, Any] | None:
        """Return everything that the laws depend on."""
        settings, models = self.settings, self.pair.fingerprint()
        if models is None:
            return None
        return {
            "models": models,
            "prompts": digest_of([prompt.text for prompt in self._prompts]),
            "raw": settings.raw,
            "temperature": temperature,
            "draft_temperature": settings.draft_temperature,
            "max_new_tokens": settings.max_new_tokens,
            "positions": settings.positions,
            "seed": settings.seed,
            "torch": torch.__version__,
        }


class _Steps:
    """Count up, for progress."""

    def __init__(self, observer: Observer, what: str, total: int) -> None:
        self._observer, self._what, self._total, self._done = observer, what, total, 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._observer(self._what, self._done, self._total)
