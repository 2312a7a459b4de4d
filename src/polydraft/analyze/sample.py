"""Text from the target, and the positions of it to look at."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from polydraft.analyze.laws import Laws, draft_laws, target_laws
from polydraft.analyze.reading import read
from polydraft.analyze.settings import AnalyzeSettings
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.loading import Loaded
from polydraft.sampling import SamplingParams
from polydraft.sampling.noise import row_seed

Observer = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer to it."""

    tokens: list[int]
    begin: int
    """Where the answer begins."""


def collect(
    settings: AnalyzeSettings,
    target: Loaded,
    draft: LanguageModel | FeatureHead,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    observer: Observer,
) -> Laws:
    """Let the target answer the prompts, and return both models' laws at some positions of the answers.

    Parameters
    ----------
    settings : AnalyzeSettings
        Of which those of the text and of the draft's temperature are used.
    target : Loaded
    draft : LanguageModel or FeatureHead
        A head reads the target's features along the text, as it does when it drafts the first token of a round.
    prompts : sequence of token-id lists
    temperature : float
        Of the text and of both laws, unless the settings have another for the draft's.
    observer : callable
        For progress.
    """
    texts = _write(settings, target, prompts, temperature, observer)
    head = draft if isinstance(draft, FeatureHead) else None
    places = _choose(texts, settings, first=1 if head is None else 2)
    own_temperature = temperature if settings.draft_temperature is None else settings.draft_temperature
    chosen = [number for number, rows in enumerate(places) if rows]
    targets, drafts, numbers = [], [], []
    for part in _batches(chosen, settings.batch_size):
        tokens, rows = [texts[number].tokens for number in part], [places[number] for number in part]
        features_RF, outputs_RH = read(target.model, tokens, rows, head)
        if not isinstance(draft, FeatureHead):
            outputs_RH, _ = read(draft, tokens, rows)
        assert outputs_RH is not None
        with torch.no_grad():
            targets.append(target_laws(target.model, features_RF, temperature, draft.vocabulary))
            drafts.append(draft_laws(draft, outputs_RH, own_temperature, target.model.vocab_size))
        numbers += [number for number, row in zip(part, rows, strict=True) for _ in row]
        observer(f"T={temperature:g}: laws", len(numbers), sum(map(len, places)))
    return Laws(torch.cat(targets), torch.cat(drafts), torch.tensor(numbers))


def _write(
    settings: AnalyzeSettings, target: Loaded, prompts: Sequence[Sequence[int]], temperature: float, observer: Observer
) -> list[Text]:
    """Generate plainly; a prompt's answer does not depend on its batch, but for the rounding of logits."""
    decoder = Decoder(target.model, eos_token_ids=target.eos_token_ids)
    total, texts = len(prompts) * settings.max_new_tokens, []
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
            texts.append(Text([*prompts[number], *result.token_ids], len(prompts[number])))
    observer(f"T={temperature:g}: text", total, total)
    return texts


def _choose(texts: Sequence[Text], settings: AnalyzeSettings, first: int) -> list[list[int]]:
    """Draw the tokens to be predicted, none of them twice, all answers' tokens alike."""
    every = [(number, place) for number, text in enumerate(texts) for place in range(max(text.begin, first), len(text.tokens))]
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
