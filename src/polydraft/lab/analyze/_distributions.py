"""Collect both models' distributions at the same positions of texts that the target writes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.lab.analyze.settings import AnalyzeSettings
from polydraft.models import Head, LanguageModel
from polydraft.models.loading import Loaded
from polydraft.sampling import PartialVocabulary, SamplingParams, Warper
from polydraft.sampling.categorical import row_seed
from polydraft.trees import causal_block

_CHUNK_BYTES = 2**28
"""Most bytes of logits to compute at a time."""

Observer = Callable[[str, int, int], None]
"""`(phase, steps done, steps in total)`: called as work progresses."""
Texts = Sequence[Sequence[int]]
Places = Sequence[Sequence[int]]
"""Ascending token indices, for each text."""


@dataclass(frozen=True, eq=False)
class Distributions:
    """Both models' probabilities of the next token, one row per position."""

    target_RV: Tensor
    """Float32, on the host. If the draft knows only part of the vocabulary, the last column stands for all other tokens."""
    draft_RV: Tensor
    prompt_R: Tensor
    """Index of each position's prompt; positions of the same prompt are correlated."""

    def __len__(self) -> int:
        return len(self.prompt_R)


def collect(
    settings: AnalyzeSettings,
    target: Loaded,
    draft: LanguageModel | Head,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    observer: Observer,
) -> Distributions:
    """Let the target answer the prompts, and return both models' distributions at random positions of the answers.

    The temperature applies to the text and to both distributions, unless the settings have another for the draft. A feature
    head reads the target's features along the text, as it does when it drafts the first token of a round.
    """
    texts = _write(settings, target, prompts, temperature, observer)
    head = draft if isinstance(draft, Head) else None
    places = _choose(texts, prompts, settings, first=1 if head is None else 2)
    own_temperature = temperature if settings.draft_temperature is None else settings.draft_temperature
    chosen = [number for number, rows in enumerate(places) if rows]
    targets, drafts, numbers = [], [], []
    for part in _batches(chosen, settings.batch_size):
        tokens, rows = [texts[number] for number in part], [places[number] for number in part]
        features_RF, outputs_RH = read(target.model, tokens, rows, head)
        if not isinstance(draft, Head):
            outputs_RH, _ = read(draft, tokens, rows)
        assert outputs_RH is not None
        with torch.no_grad():
            targets.append(target_distributions(target.model, features_RF, temperature, draft.vocabulary))
            drafts.append(draft_distributions(draft, outputs_RH, own_temperature, target.model.vocab_size))
        numbers += [number for number, row in zip(part, rows, strict=True) for _ in row]
        observer(f"T={temperature:g}: distributions", len(numbers), sum(map(len, places)))
    return Distributions(torch.cat(targets), torch.cat(drafts), torch.tensor(numbers))


def _write(
    settings: AnalyzeSettings, target: Loaded, prompts: Sequence[Sequence[int]], temperature: float, observer: Observer
) -> list[list[int]]:
    """Return each prompt with its answer by plain decoding, which depends on the rest of the batch only through rounding."""
    decoder = Decoder(target.model, eos_token_ids=target.eos_token_ids)
    total, texts = len(prompts) * settings.max_new_tokens, []
    observer(f"T={temperature:g}: text", 0, total)
    for part in _batches(range(len(prompts)), settings.batch_size):
        stream = decoder.stream(
            [list(prompts[number]) for number in part],
            sampling=SamplingParams(temperature=temperature),
            max_new_tokens=settings.max_new_tokens,
            seed=[row_seed(settings.seed, number) for number in part],
        )
        done = part[0] * settings.max_new_tokens
        for written, _ in enumerate(stream, start=1):
            observer(f"T={temperature:g}: text", done + written, total)
        for number, result in zip(part, stream.results(), strict=True):
            texts.append([*prompts[number], *result.token_ids])
    observer(f"T={temperature:g}: text", total, total)
    return texts


def _choose(texts: Texts, prompts: Texts, settings: AnalyzeSettings, first: int) -> list[list[int]]:
    """Choose random positions from all answers, without replacement."""
    pairs = enumerate(zip(texts, prompts, strict=True))
    every = [(number, place) for number, (text, prompt) in pairs for place in range(max(len(prompt), first), len(text))]
    if not every:
        raise UsageError(
            "the answers hold no token that this draft could propose; raise --max-new-tokens or give longer prompts"
        )
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(settings.seed % 2**32)).tolist()
    places: list[list[int]] = [[] for _ in texts]
    for index in sorted(order[: settings.positions]):
        number, place = every[index]
        places[number].append(place)
    return places


def _batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))


@torch.no_grad()
def read(model: LanguageModel, texts: Texts, places: Places, head: Head | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the features from which a model predicts the tokens at `places`, and the outputs of a head at the same places.

    Places are at least 1, or at least 2 with a head, whose first entry is a pair of tokens. Rows are ordered by text, then by
    place.
    """
    known = [list(text[: rows[-1]]) if rows else [] for text, rows in zip(texts, places, strict=True)]
    longest = max(map(len, known))
    features = _Picker([[place - 1 for place in rows] for rows in places])
    outputs = _Picker([[place - 2 for place in rows] for rows in places])
    entries = head.start(len(known), longest) if head is not None else None

    def observe(rows: slice, starts: Sequence[int], counts: Sequence[int], features_BTF: Tensor) -> None:
        features.take(starts, counts, features_BTF)
        if head is None or entries is None:
            return
        size = features_BTF.shape[1]
        # Entry i joins the features at i with the token at i + 1.
        following = [
            list(text[start + 1 : start + 1 + count]) for text, start, count in zip(texts, starts, counts, strict=True)
        ]
        tokens_BT = torch.tensor([tokens + [0] * (size - len(tokens)) for tokens in following], device=head.device)
        entries.reserve(max(entries.lengths) + size)
        outputs_BTH = entries.read(tokens_BT, head.fused(features_BTF), causal_block(len(known), size, head.device))
        outputs.take(starts, counts, outputs_BTH)
        entries.rewind([start + count for start, count in zip(starts, counts, strict=True)])

    model.start(len(known), longest).prefill(known, observe)
    return features.picked(), outputs.picked() if head is not None else None


class _Picker:
    """Picks the rows at some places of each text from the chunks of a prefill."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._kept: list[list[Tensor]] = [[] for _ in places]

    def take(self, starts: Sequence[int], counts: Sequence[int], values_BTX: Tensor) -> None:
        """Keep the wanted rows of the next chunk of each text."""
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            inside = [place - start for place in self._places[row] if start <= place < start + count]
            if inside:
                self._kept[row].append(values_BTX[row, inside])

    def picked(self) -> Tensor:
        """Return all rows, text by text."""
        return torch.cat([part for kept in self._kept for part in kept])


def target_distributions(
    target: LanguageModel, features_RF: Tensor, temperature: float, vocabulary: PartialVocabulary | None
) -> Tensor:
    """Return the target's distributions over the tokens that the draft knows, with one more column for all others, if any.

    One column is enough, because acceptance depends only on the total probability of tokens that the draft cannot propose.
    """
    parts = []
    for part_RF in _chunks(features_RF, target.vocab_size):
        probs_RV = _warped(target.head(part_RF), temperature)
        if vocabulary is not None:
            known_RD = probs_RV[:, vocabulary.tokens_D]
            others_RV = probs_RV.index_fill(1, vocabulary.tokens_D, 0.0)
            probs_RV = torch.cat([known_RD, others_RV.sum(-1, keepdim=True, dtype=torch.float64).float()], dim=1)
        parts.append(probs_RV.cpu())
    return _checked(torch.cat(parts), "target", target.name)


def draft_distributions(draft: LanguageModel | Head, features_RF: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """Return the draft's distributions in the columns of `target_distributions`."""
    parts = []
    for part_RF in _chunks(features_RF, vocab_size):
        logits_RD = draft.head(part_RF)
        if draft.vocabulary is None:
            # Padding columns get no mass.
            missing = vocab_size - logits_RD.shape[-1]
            probs_RV = _warped(torch.nn.functional.pad(logits_RD, (0, missing), value=-torch.inf), temperature)
        else:
            probs_RV = torch.nn.functional.pad(_warped(logits_RD, temperature), (0, 1))
        parts.append(probs_RV.cpu())
    return _checked(torch.cat(parts), "draft", draft.name)


def _chunks(features_RF: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    return torch.split(features_RF, max(1, _CHUNK_BYTES // (4 * vocab_size)))


def _warped(logits_RV: Tensor, temperature: float) -> Tensor:
    warper = Warper(SamplingParams(temperature=temperature), logits_RV.shape[-1], [], logits_RV.device)
    nothing_1RP = torch.empty(1, len(logits_RV), 0, dtype=torch.long, device=logits_RV.device)
    return warper.probs(logits_RV[None], nothing_1RP)[0]


def _checked(probs_RV: Tensor, role: str, name: str) -> Tensor:
    if not probs_RV.isfinite().all():
        raise FailureError(f"logits of {role} {name!r} are not numbers; its weights may be broken, or overflow in this dtype")
    return probs_RV
