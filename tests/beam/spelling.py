"""A tokenizer for the tiny models, whose stop strings span tokens, begin inside of them and tear characters."""

import random
from functools import cache
from itertools import product

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BREAK = "|"
_TORN = ("Ã", "©", "aÃ", "cÃ", "©b", "©Ã©", "Ã©", "bÃ©", "Ã©c", "|a", "d|", BREAK)
"""Ã and © are how byte-level vocabularies write the two bytes of é."""


@cache
def spelling() -> PreTrainedTokenizerFast:
    """Ninety-six tokens: all strings of one to three of four letters, and some with é or half of it."""
    words = ["".join(letters) for length in (1, 2, 3) for letters in product("abcd", repeat=length)]
    words += _TORN
    random.Random(0).shuffle(words)
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def spelled(tokens: list[int]) -> str:
    return spelling().decode(tokens, skip_special_tokens=True)


def token_of(word: str) -> int:
    return spelling().convert_tokens_to_ids(word)
