"""Compare schemes on a pair of models: text, distributions (kept on disk, so that more schemes need no models), figures."""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polydraft.defaults import default_draft
from polydraft.engine import Decoder
from polydraft.errors import UsageError, first_line
from polydraft.lab.analyze._distributions import Distributions, Observer, collect
from polydraft.lab.analyze.comparison import Comparison, Row, takes
from polydraft.lab.analyze.settings import AnalyzeSettings
from polydraft.models import Head, LanguageModel, check_prompts
from polydraft.models.fingerprint import digest_of, model_fingerprint
from polydraft.models.loading import ALLOWED_TARGETS, Loaded, check_name, load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype
from polydraft.models.translation import refuse_translated
from polydraft.output import written_whole
from polydraft.prompts import load_prompts
from polydraft.verify import SCHEMES

logger = logging.getLogger(__name__)

_FORMAT = 1
_NAMES = ("target", "draft", "prompt")


class Pair:
    """A target and its draft, named as for `polydraft.load` and loaded on first use."""

    def __init__(self, target: str, draft: str, device: str, dtype: str) -> None:
        check_name("model", target, ALLOWED_TARGETS)
        self.target_name = target
        self.draft_name = default_draft(target, draft)
        if self.draft_name == "none":
            raise UsageError(f"target {target!r} has no draft to compare with; pass --draft NAME, a folder, or early-exit:k")
        self.device: torch.device = resolve_device(device)
        self.dtype: torch.dtype = resolve_dtype(dtype, self.device)

    @cached_property
    def target(self) -> Loaded:
        """The loaded target."""
        return load_model(self.target_name, self.device, self.dtype)

    @cached_property
    def draft(self) -> LanguageModel | Head:
        """The loaded draft."""
        draft = load_draft(self.draft_name, self.target)
        assert draft is not None, "__init__ refused 'none'"
        refuse_translated(draft, "analyze")
        if isinstance(draft, Head) and draft.lacks is not None:
            raise UsageError(f"draft {self.draft_name!r} {draft.lacks}, as analyze needs; use another draft")
        return draft

    def fingerprint(self) -> list[str] | None:
        """Return fingerprints of both models' files, with dtype and device; None if some are not downloaded yet."""
        marks = [model_fingerprint(name) for name in (self.target_name, self.draft_name)]
        found = [mark for mark in marks if mark is not None]
        return [*found, str(self.dtype), self.device.type] if len(found) == len(marks) else None


class DistributionStore:
    """Distributions on disk, found by their origin; beyond `most_bytes` the oldest are removed.

    An origin is everything that the distributions depend on. A file's header has the origin and a checksum. A file that does
    not match them, or cannot be read, counts as missing and is written again.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self._folder, self._most_bytes = folder, most_bytes

    def file(self, origin: dict[str, Any]) -> Path:
        """Return the file for the distributions of an origin."""
        return self._folder / f"distributions-{digest_of(origin)}.safetensors"

    def load(self, origin: dict[str, Any]) -> Distributions | None:
        """Return the distributions of an origin, or None if they are not stored or incomplete."""
        file = self.file(origin)
        if not file.exists():
            return None
        try:
            with safe_open(file, "pt") as opened:
                header = opened.metadata() or {}
                target_RV, draft_RV, prompt_R = (opened.get_tensor(name) for name in _NAMES)
        except (OSError, SafetensorError, ValueError) as error:
            logger.info("%s cannot be read (%s): collecting its distributions again", file, first_line(error))
            return None
        if header != _header(origin, target_RV, draft_RV, prompt_R):
            logger.info("%s does not match its header: collecting its distributions again", file)
            return None
        return Distributions(target_RV, draft_RV, prompt_R)

    def save(self, origin: dict[str, Any], distributions: Distributions) -> None:
        """Store distributions, completely or not at all; if the disk is full, only log that."""
        tensors = [tensor.contiguous() for tensor in (distributions.target_RV, distributions.draft_RV, distributions.prompt_R)]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_whole(self.file(origin)) as partial:
                save_file(dict(zip(_NAMES, tensors, strict=True)), partial, _header(origin, *tensors))
            self._make_room()
        except (OSError, SafetensorError) as error:
            logger.info("distributions are not kept: cannot write to %s (%s)", self._folder, error)

    def _make_room(self) -> None:
        if self._most_bytes is None:
            return
        newest_first = sorted(
            self._folder.glob("distributions-*.safetensors"), key=lambda file: file.stat().st_mtime_ns, reverse=True
        )
        kept = 0
        for file in newest_first:
            kept += file.stat().st_size
            if kept > self._most_bytes and file is not newest_first[0]:
                file.unlink(missing_ok=True)


def _header(origin: dict[str, Any], *tensors: Tensor) -> dict[str, str]:
    """Return a file's header: its origin, and a checksum of its numbers."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.numpy().tobytes())
    return {"format": str(_FORMAT), "origin": json.dumps(origin, sort_keys=True), "checksum": checksum.hexdigest()}


@dataclass(frozen=True)
class SampleSize:
    """The number of prompts and positions behind the rows of one temperature."""

    temperature: float
    positions: int
    prompts: int


class Analysis:
    """Compares schemes with their optima on the distributions of one pair of models, kept in the store if there is one.

    Notes
    -----
    As in §6 of [1], the target answers prompts, both models' distributions are collected along the answers, and acceptance is
    averaged over positions. Deviations: errors are over prompts, because positions of one answer are correlated; a random
    sample of positions is used; acceptance is computed, not sampled, where `polydraft.lab.theory` can; the optimum of drawing
    without replacement is that of sequential drawing.

    References
    ----------
    .. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
    """

    def __init__(
        self, settings: AnalyzeSettings, store: DistributionStore | None = None, observer: Observer | None = None
    ) -> None:
        self.settings, self._store = settings, store
        self._observer: Observer = observer or (lambda what, done, total: None)
        self._prompts = load_prompts(settings.source, settings.limit, settings.categories)
        self.pair = Pair(settings.target, settings.draft, settings.device, settings.dtype)
        self.sizes: list[SampleSize] = []
        """One per temperature done so far."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows by temperature, then by number of drafts; skip schemes that cannot take that many drafts."""
        settings = self.settings
        for temperature in dict.fromkeys(settings.temperatures):
            distributions = self.distributions(temperature)
            self.sizes.append(SampleSize(temperature, len(distributions), len(set(distributions.prompt_R.tolist()))))
            comparison = Comparison(
                distributions,
                temperature,
                device=self.pair.device,
                seed=settings.seed,
                paper_bound=settings.paper_bound,
            )
            pairs = [(name, count) for count in dict.fromkeys(settings.drafts) for name in settings.scheme_names]
            pairs = [(name, count) for name, count in pairs if takes(SCHEMES.get(name), count)]
            phase = f"T={temperature:g}: acceptance"
            self._observer(phase, 0, len(pairs))
            for done, (name, count) in enumerate(pairs, start=1):
                row = comparison.row(name, count)
                self._observer(phase, done, len(pairs))
                yield row

    def distributions(self, temperature: float) -> Distributions:
        """Return the distributions at one temperature, from the store if it has them."""
        origin = self._origin(temperature)
        kept = self._store.load(origin) if self._store is not None and origin is not None else None
        if kept is not None:
            return kept
        distributions = collect(self.settings, self.pair.target, self.pair.draft, self._encoded(), temperature, self._observer)
        # Again, because the files of a downloaded model exist only now.
        origin = self._origin(temperature)
        if self._store is not None and origin is not None:
            self._store.save(origin, distributions)
        return distributions

    def _encoded(self) -> list[list[int]]:
        target = self.pair.target
        encoder = Decoder(target.model, tokenizer=target.tokenizer)
        prompts = [encoder.encode(prompt.content, chat=not self.settings.raw) for prompt in self._prompts]
        check_prompts(prompts, target.model.max_positions, target.model.vocab_size)
        return prompts

    def _origin(self, temperature: float) -> dict[str, Any] | None:
        """Return everything that the distributions depend on; None if the models are not downloaded yet."""
        settings, models = self.settings, self.pair.fingerprint()
        if models is None:
            return None
        return {
            "models": models,
            "prompts": digest_of([json.dumps(prompt.content) if prompt.messages else prompt.text for prompt in self._prompts]),
            "raw": settings.raw,
            "temperature": temperature,
            "draft_temperature": settings.draft_temperature,
            "max_new_tokens": settings.max_new_tokens,
            "positions": settings.positions,
            "seed": settings.seed,
            "torch": torch.__version__,
        }
