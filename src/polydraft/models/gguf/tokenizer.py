"""Tokenizers from the tokens, merges and scores in a GGUF header.

The tables go straight to the package `tokenizers`, which takes seconds. Texts get the same tokens as from
`AutoTokenizer.from_pretrained(gguf_file=...)`, which takes minutes to read a large vocabulary.
"""

import json
from pathlib import Path
from typing import Any

from polydraft.errors import UsageError
from polydraft.models.gguf.header import GgufHeader
from polydraft.models.spelling import byte_letters

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are never split; control tokens are not text."""
_SPACE = "▁"
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3n")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    _CASED + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|" + _CASED + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    _CASED + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS + "|" + _CASED + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
}
"""How texts are split into words before merging, by the name in the file; by default as in GPT-2."""


def check_tokenizer(source: Path, header: GgufHeader) -> None:
    """Refuse a file without a tokenizer, or with one of an unknown kind."""
    kind = header.fields.get("tokenizer.ggml.model")
    if not header.tokens or kind not in ("gpt2", "llama", "gemma4"):
        what = f"a tokenizer of the kind {kind!r}" if header.tokens else "no tokenizer"
        raise UsageError(f"{source.name} has {what}; allowed: gpt2, llama; use the model in its own format")


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write a file's tokenizer, special tokens and chat template in the format of `transformers`."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    kind = header.fields.get("tokenizer.ggml.model")
    make = _byte_level if kind == "gpt2" else _gemma if header.architecture in _GEMMA or kind == "gemma4" else _sentence_pieces
    tokenizer = make(header)
    _add_whole_tokens(tokenizer, header, byte_level=kind == "gpt2")
    settings: dict[str, Any] = {"backend": "tokenizers", "tokenizer_class": PreTrainedTokenizerFast.__name__}
    ends: dict[str, tuple[str, int]] = {}
    for end, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = header.fields.get(f"tokenizer.ggml.{key}_token_id")
        if not isinstance(number, int) or not 0 <= number < len(header.tokens):
            settings[f"{end}_token"] = None
            continue
        settings[f"{end}_token"] = header.tokens[number]
        # Without its first token, Gemma repeats one word forever.
        said = header.fields.get(f"tokenizer.ggml.add_{end}_token")
        if said is not None:
            settings[f"add_{end}_token"] = bool(said)
        if said:
            ends[end] = header.tokens[number], number
    first, last = ([ends[end][0]] if end in ends else [] for end in ("bos", "eos"))
    single = [f"{part}:0" for part in (*first, "$A", *last)]
    pair = [*single, *(f"{part}:1" for part in (*first, "$B", *last))]
    tokenizer.post_processor = processors.TemplateProcessing(single, pair, list(ends.values()))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if isinstance(template := header.fields.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _byte_level(header: GgufHeader) -> Any:
    """Return a byte-level BPE tokenizer like GPT-2's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    spelling = byte_letters()
    alphabet = set(spelling)
    vocabulary = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode("utf-8")): number
        for number, token in enumerate(header.tokens)
    }
    affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(header, header.tokens), fuse_unk=False, **affixes))
    if header.architecture.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    split = _SPLITS.get(str(header.fields.get("tokenizer.ggml.pre")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(header: GgufHeader) -> Any:
    """Return a BPE tokenizer over characters that falls back to bytes, like Llama's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(header.tokens)}
    merges = _merges(header, header.tokens, header.fields.get("tokenizer.ggml.scores"))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    prefixed = bool(header.fields.get("tokenizer.ggml.add_space_prefix", True))
    if header.architecture == "phi3":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if prefixed else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if prefixed else parts)
    return tokenizer


def _gemma(header: GgufHeader) -> Any:
    """Return Gemma's tokenizer: tokens with lower ids are merged first, and runs of spaces are tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [_SPACE * len(token) if " " in token and not token.strip() else token for token in header.tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(header, tokens, [-number for number in range(len(tokens))])
    unknown = header.fields.get("tokenizer.ggml.unknown_token_id")
    options: dict[str, Any] = {"unk_token": tokens[unknown]} if isinstance(unknown, int) and 0 <= unknown < len(tokens) else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, **options))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges(header: GgufHeader, tokens: list[str], scores: list[float] | None = None) -> list[tuple[str, str]]:
    """Return the merges listed in a file, or those implied by the scores of its tokens, likeliest first."""
    if isinstance(listed := header.fields.get("tokenizer.ggml.merges"), list):
        pairs = (merge.partition(" ") for merge in listed)
        return [(left, right) for left, _, right in pairs]
    if scores is None:
        return []
    numbers = {token: number for number, token in enumerate(tokens)}
    rated = dict(zip(tokens, scores, strict=True))
    found = []
    for token, score in rated.items():
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        halves = [pair for pair in pairs if pair[0] in numbers and pair[1] in numbers]
        if len(halves) > 1:
            halves.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in halves]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_whole_tokens(tokenizer: Any, header: GgufHeader, byte_level: bool) -> None:
    """Add the control and user-defined tokens of a file, which are never split.

    In a byte-level vocabulary, a control token that is not written in the alphabet of bytes is a mistake and is left out.
    """
    from tokenizers import AddedToken

    kinds = header.fields.get("tokenizer.ggml.token_type")
    marked = list(zip(header.tokens, kinds, strict=False)) if isinstance(kinds, list) else []
    alphabet = set(byte_letters())
    control = [token for token, kind in marked if kind == _CONTROL and (not byte_level or alphabet.issuperset(token))]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    known = tokenizer.get_vocab()
    defined = [token for token, kind in marked if kind == _USER_DEFINED and token in known]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
