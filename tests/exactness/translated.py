"""A draft whose tokens are not the target's: other words, other numbers, and another way to cut a text into them."""

from collections.abc import Sequence
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import FAMILIES
from polydraft.models import LanguageModel, TabularModel
from polydraft.models.hf import HFModel
from polydraft.models.translation import TranslatedModel, translated

from .setups import TARGET, VOCABULARY

_LETTERS = "abcdefgĊ"
_PAIRS = [one + other for one in _LETTERS for other in _LETTERS]
TARGET_WORDS = [*_LETTERS, *_PAIRS[:32:2], *_PAIRS[1:16:2]]
DRAFT_WORDS = [*_LETTERS[::-1], *_PAIRS[2:24], *(pair + "c" for pair in _PAIRS[2:8])]
_AGREES = 0.75
"""How much of the draft's logits are the target's, where both have the tokens."""


def tokenizer_of(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer that joins letters to these words, the first ones first."""
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def translated_draft() -> TranslatedModel:
    """Return a draft that agrees with the target in part, on the words that both have."""
    assert len(set(TARGET_WORDS)) == VOCABULARY
    numbers = {word: number for number, word in enumerate(TARGET_WORDS)}
    alike_D = torch.tensor([numbers.get(word, numbers[word[0]]) for word in DRAFT_WORDS])
    size = len(DRAFT_WORDS)
    table_XXXV = TARGET.logits_XV.reshape([VOCABULARY] * 4)[alike_D][:, alike_D][:, :, alike_D][..., alike_D].double()
    noise_XXXV = TabularModel.random(size, order=3, seed=8, sharpness=2.5).logits_XV.reshape([size] * 4)
    return _translated(TabularModel(_AGREES * table_XXXV + (1 - _AGREES) * noise_XXXV, name="draft"))


@cache
def translated_network() -> TranslatedModel:
    """Return a tiny Llama with the same words: what it says depends on all that it has read."""
    return _translated(HFModel(FAMILIES.get("llama").build(seed=4, vocab_size=len(DRAFT_WORDS), initializer_range=0.3)))


def _translated(draft: LanguageModel) -> TranslatedModel:
    return translated(draft, (tokenizer_of(TARGET_WORDS), tokenizer_of(DRAFT_WORDS)), ((), ()), TARGET)
