"""Drafts whose tokenizer is not the target's: which tokens they share, and how the draft reads the target's text.

Token-level intersection [1]_: the draft reads the text in its own tokens, and proposes only tokens that both have. Its
distribution over these, renormalised, depends on the text alone, so every verifier stays exact. (transformers tokenizes each
new token by itself; here the text is tokenized as a whole, as in the draft's training.)

References
----------
.. [1] Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies,
   2025 (token-level intersection).
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models.given import check_draft
from polydraft.models.language_model import Context, LanguageModel
from polydraft.models.spelling import shared_tokens, spelled, spelling_of
from polydraft.sampling import PartialVocabulary

if TYPE_CHECKING:
    from polydraft.models.loading import Loaded

logger = logging.getLogger("polydraft.models.loading")
LEAST_SHARE = 0.05
"""Share of the target's tokens that a draft must have: with fewer, it proposes little more than single characters."""
_MOST_OTHERS = 64
"""Two vocabularies count as the same if at most one token in this many is missing from either."""
_LEAST_TEXT = 2
"""Least tokens of a text for the draft, so that shorter ones need no special treatment."""
_LINE = "\n"
_BROKEN = re.compile("([\udc80-\udcff]+)")
"""Bytes that are not valid UTF-8, as Python's surrogateescape decodes them."""


@dataclass(frozen=True)
class Translated:
    """A text in the draft's tokens, and the part of it that stays the same however the text continues."""

    ids: Sequence[int] = ()
    sure: Sequence[int] = ()
    """The target's tokens up to the last place where the text was cut."""
    sure_ids: Sequence[int] = ()
    """The draft's tokens for these."""
    anchor: str = ""
    """The text just before the cut, which the tokenization of the rest depends on."""


class Translation:
    """Translates texts from the target's tokens to the draft's.

    A text is tokenized in pieces, so that little has to be done again when it grows. It is cut where no tokenizer joins
    anything: at special tokens, and after line breaks without other white space around them. The result depends on the text
    alone.

    Parameters
    ----------
    spelled : mapping
        The bytes of each of the target's tokens.
    atoms : mapping
        For each special token of the target that the draft shares, the draft's token and its name.
    tokenizer : transformers.PreTrainedTokenizerFast
        The draft's.
    byte_ids : mapping
        The draft's tokens for single bytes, used for incomplete characters.
    first : int, optional
        The target's beginning-of-text token, which is replaced by the draft's own.
    spaced : bool
        Whether the target's tokenizer puts a space before each text.
    """

    def __init__(
        self,
        spelled: Mapping[int, bytes],
        atoms: Mapping[int, tuple[int, str]],
        tokenizer: Any,
        byte_ids: Mapping[int, int],
        first: int | None,
        spaced: bool,
    ) -> None:
        self._spelled, self._atoms, self._tokenizer, self._byte_ids = spelled, atoms, tokenizer, byte_ids
        self._first, self._spaced = first, spaced
        own = tokenizer.bos_token_id
        self._start = [own] if own is not None and tokenizer("").input_ids[:1] == [own] else []
        self._filling = self._start[0] if self._start else tokenizer.eos_token_id or 0
        self._anchor_ids: dict[str, int] = {}

    def translate(self, text: Sequence[int], known: Translated) -> Translated:
        """Translate a text; `known` is an earlier translation, whose beginning is reused if the texts begin alike."""
        if not self._holds(known, text):
            known = Translated()
        begun = int(len(text) > 0 and text[0] == self._first)
        """Where the text begins, after the beginning-of-text token."""
        cut, ids, anchor = len(known.sure), list(known.sure_ids), known.anchor
        if not cut:
            ids = list(self._start)
        settled, piece = len(ids), bytearray()
        for place in range(cut, len(text)):
            token = text[place]
            spelled, atom = self._spelled.get(token, b""), self._atoms.get(token)
            line = piece.endswith(b"\n") and not (piece[-2:-1].isspace() or spelled[:1].isspace())
            if atom is not None or line:
                ids += self._tokenized(anchor, bytes(piece))
                piece.clear()
                if atom is None:
                    cut, anchor = place, _LINE
                else:
                    ids += [atom[0]] if place or self._start != [atom[0]] else []
                    cut, anchor = place + 1, atom[1]
                settled = len(ids)
            if atom is None and place >= begun:
                piece += spelled[1:] if self._spaced and place == begun and spelled[:1] == b" " else spelled
        sure_ids = ids[:settled]
        ids += self._tokenized(anchor, bytes(piece))
        ids = [self._filling] * (_LEAST_TEXT - len(ids)) + ids
        return Translated(ids, list(text[:cut]), sure_ids, anchor)

    def _holds(self, known: Translated, text: Sequence[int]) -> bool:
        """Whether the sure part of an earlier translation is also sure for this text."""
        place = len(known.sure)
        following = self._spelled.get(text[place], b"") if place < len(text) else b""
        # The earlier text was cut after a line break because no white space followed. In this text, some may.
        return list(text[:place]) == list(known.sure) and not (known.anchor == _LINE and following[:1].isspace())

    def _tokenized(self, anchor: str, piece: bytes) -> list[int]:
        """Return the draft's tokens for a piece of text that follows `anchor`; incomplete characters become byte tokens."""
        ids: list[int] = []
        for part in _BROKEN.split(piece.decode("utf-8", "surrogateescape")):
            if _BROKEN.match(part):
                ids += [self._byte_ids[ord(one) & 0xFF] for one in part if ord(one) & 0xFF in self._byte_ids]
            elif part:
                if anchor not in self._anchor_ids:
                    self._anchor_ids[anchor] = len(self._encoded(anchor))
                ids += self._encoded(anchor + part)[self._anchor_ids[anchor] :]
            anchor = _LINE if part else anchor
        return ids

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


class TranslatedModel(LanguageModel):
    """A draft with another tokenizer, which proposes only tokens that the target has too.

    Its contexts hold the draft's tokens: `polydraft.draft.translated_source` reads the target's text into them.

    Parameters
    ----------
    model : LanguageModel
    translation : Translation
    shared : mapping
        The draft's token for each of the target's tokens that both have, in ascending order.
    size : int
        Size of the target's vocabulary.
    """

    def __init__(self, model: LanguageModel, translation: Translation, shared: Mapping[int, int], size: int) -> None:
        self.model, self.translation, self.name, self.device = model, translation, model.name, model.device
        self.shared = shared
        self.dtype: torch.dtype = getattr(model, "dtype", torch.float32)
        self.max_positions, self.vocab_size = model.max_positions, size
        self.graph_obstacle, self.shape_obstacle = model.graph_obstacle, model.shape_obstacle
        self._own_D = torch.tensor(list(shared.values()), device=self.device)
        self.vocabulary: PartialVocabulary = PartialVocabulary(torch.tensor(list(shared), device=self.device), size)

    @cached_property
    def own_X(self) -> Tensor:
        """The draft's token for each of the target's; 0 where it has none. The last entry is for `NO_TOKEN`."""
        own_X = torch.zeros(self.vocab_size + 1, dtype=torch.long, device=self.device)
        return own_X.scatter_(0, self.vocabulary.tokens_D, self._own_D)

    def start(self, batch_size: int, capacity: int) -> Context:
        """Return an empty context for the draft's tokens."""
        return self.model.start(batch_size, capacity)

    def head(self, features_RF: Tensor) -> Tensor:
        """Return the logits of the shared tokens."""
        return self.model.head(features_RF).index_select(-1, self._own_D)


def translated(
    model: LanguageModel,
    tokenizers: tuple[Any, Any],
    ends: tuple[Sequence[int], Sequence[int]],
    target: LanguageModel,
) -> TranslatedModel:
    """Return a draft for a target with another tokenizer; refuse one that shares too few tokens.

    Parameters
    ----------
    model : LanguageModel
        The draft.
    tokenizers, ends : pair
        The target's tokenizer and end-of-text tokens, and the draft's.
    target : LanguageModel
    """
    ours, theirs = spelling_of(tokenizers[0], target.name), spelling_of(tokenizers[1], model.name)
    # Tokens added to a tokenizer but not to its model have no row in the model's tables.
    both = shared_tokens(ours, theirs, *ends).items()
    shared = {token: other for token, other in both if token < target.vocab_size and other < model.vocab_size}
    check_share(len(shared), len(ours.bytes_of), target.name, model.name)
    logger.info(
        "draft %s has another tokenizer: it shares %.0f %% of the target's tokens (%d of %d), and proposes only these",
        *(model.name, 100 * len(shared) / len(ours.bytes_of), len(shared), len(ours.bytes_of)),
    )
    names = {number: name for name, number in theirs.special.items()}
    atoms = {token: (shared[token], names.get(shared[token], "")) for token in ours.special.values() if token in shared}
    byte_ids = {spelled[0]: token for spelled, token in theirs.tokens().items() if len(spelled) == 1}
    start = tokenizers[0].encode("a", add_special_tokens=False)[:1]
    spaced = any(ours.bytes_of[token].startswith(b" ") for token in start)
    translation = Translation(ours.bytes_of, atoms, tokenizers[1], byte_ids, tokenizers[0].bos_token_id, spaced)
    return TranslatedModel(model, translation, shared, target.vocab_size)


def refuse_translated(draft: Any, what: str) -> None:
    """Refuse a draft with another tokenizer in a use that does not support it."""
    if isinstance(draft, TranslatedModel):
        raise UsageError(f"{what} needs a draft with the target's tokenizer, but {draft.name!r} has another; use another draft")


def check_same_tokens(target: "Loaded", draft: "Loaded") -> None:
    """Refuse a draft whose vocabulary is not the target's; without the target's tokenizer, only sizes are compared."""
    if target.tokenizer is None:
        return check_draft(draft.model, target.model)
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise UsageError(
            f"draft {draft.model.name!r} and target {target.model.name!r} have different vocabularies ({len(theirs)} and "
            f"{len(ours)} tokens, {differing} of the target's differ); use a draft with the target's tokenizer"
        )


def have_same_numbers(ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Whether two vocabularies have nearly all tokens in common, with the same ids.

    The draft then uses the target's ids. A few may mean something else to it, which does no harm: they are never accepted.
    """
    both = ours.keys() & theirs.keys()
    others = max(len(ours), len(theirs)) - len(both)
    return others <= len(ours) // _MOST_OTHERS and all(ours[token] == theirs[token] for token in both)


def check_vocabularies(ours: Mapping[str, int], theirs: Mapping[str, int], target: str, draft: str) -> None:
    """Refuse a draft that shares too few tokens, judging by its vocabulary alone; an empty vocabulary is unknown."""
    vocabularies = [{spelled(token, "\u0120" in own and "\u2581" not in own) for token in own} for own in (ours, theirs)]
    if theirs:
        check_share(len(vocabularies[0] & vocabularies[1]), len(ours), target, draft)


def check_share(shared: int, size: int, target: str, draft: str) -> None:
    """Refuse a draft that shares too few of the target's tokens."""
    if shared < LEAST_SHARE * size:
        raise UsageError(
            f"draft {draft!r} and target {target!r} have different vocabularies and share {shared} of the target's {size} "
            f"tokens; use a draft that shares at least {LEAST_SHARE:.0%}"
        )
