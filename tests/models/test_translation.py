"""Tokens of two tokenizers: what both have, and a text of one in the tokens of the other."""

import random
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from polydraft.errors import UsageError
from polydraft.models import TabularModel
from polydraft.models.spelling import shared_tokens, spelling_of
from polydraft.models.translation import (
    Translated,
    TranslatedModel,
    check_vocabularies,
    have_same_numbers,
    refuse_translated,
    translated,
)

SPECIAL = ["<s>", "</s>", "<turn>"]
LINES = [
    "def f(x):\n    return x + 1\n\nprint(f(3))\n",
    "The other day the  fox said:\r\n\tnaïve cafés, 你好 🦊!\n\n\n  1234 and 1,2\n",
    "\n\nwhile True:\n\n    pass\nelse:\n  the end",
]


def byte_level(size: int, special: list[str], lines: list[str] = LINES) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    return finished(tokenizer, special)


def pieces(size: int, special: list[str]) -> PreTrainedTokenizerFast:
    """As SentencePiece has it: ▁ for spaces, one before the text, and bytes where no token is known."""
    stand_ins = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    lines = [line for text in LINES for line in text.split("\n") if "你" not in line]
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, special_tokens=stand_ins, show_progress=False))
    state = tokenizer.model
    tokenizer = Tokenizer(state)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return finished(tokenizer, special)


def finished(tokenizer: Tokenizer, special: list[str]) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>" if "</s>" in special else special[-1])


TOKENIZERS = {
    "bytes": byte_level(420, SPECIAL),
    "fewer": byte_level(330, ["<turn>", "<end>"], LINES[::2]),
    "pieces": pieces(370, SPECIAL),
}
PAIRS = [(one, other) for one in TOKENIZERS for other in TOKENIZERS if one != other]
every_pair = pytest.mark.parametrize(("target", "draft"), PAIRS)


def model(name: str) -> TabularModel:
    return TabularModel(torch.zeros(1, 1).expand(1, max(TOKENIZERS[name].get_vocab().values()) + 1), name=name)


def pair(target: str, draft: str) -> TranslatedModel:
    both = TOKENIZERS[target], TOKENIZERS[draft]
    return translated(model(draft), both, ([both[0].eos_token_id], [both[1].eos_token_id]), model(target))


@every_pair
def test_shared_tokens_spell_the_same(target: str, draft: str) -> None:
    ours, theirs = TOKENIZERS[target], TOKENIZERS[draft]
    shared = pair(target, draft).shared
    assert len(shared) > 60
    special = {*ours.all_special_ids, *ours.added_tokens_decoder}
    for token, other in shared.items():
        if token not in special:  # a letter before them: the first space of a text is left out by some
            texts = [
                one.decode([one.encode("x", add_special_tokens=False)[-1], number])
                for one, number in ((ours, token), (theirs, other))
            ]
            assert texts[0] == texts[1] and "Ġ" not in texts[0] and "▁" not in texts[0]
    assert shared[ours.convert_tokens_to_ids("<turn>")] == theirs.convert_tokens_to_ids("<turn>")
    assert shared[ours.eos_token_id] == theirs.eos_token_id
    assert list(shared) == sorted(shared) and len(set(shared.values())) == len(shared)


@every_pair
def test_a_text_is_what_the_draft_s_tokenizer_makes_of_it(target: str, draft: str) -> None:
    translation = pair(target, draft).translation
    for text in (*LINES, "".join(LINES), "a" + "\nb" * 20):
        ids = translation.translate(TOKENIZERS[target].encode(text), Translated()).ids
        assert ids == TOKENIZERS[draft].encode(text)


@every_pair
def test_a_text_that_grows_is_tokenized_as_if_it_had_been_there(target: str, draft: str) -> None:
    translation, chance = pair(target, draft).translation, random.Random(2)
    tokens = TOKENIZERS[target].encode("".join(LINES) + "<turn>user\n" + "\n".join("abc" * 3) + "<turn>" + LINES[0])
    known, longest = Translated(), 0
    for _ in range(60):
        length = max(1, min(len(tokens), longest + chance.randrange(-3, 9)))
        text = tokens[:length]
        known, longest = translation.translate(text, known), length
        assert list(known.ids) == list(translation.translate(text, Translated()).ids)
    assert len(known.sure) > len(tokens) / 2, "what was settled long ago is not done again"


@every_pair
def test_another_text_in_the_same_row_is_tokenized_as_if_it_stood_alone(target: str, draft: str) -> None:
    """A line of the last text ended where this one goes on with spaces."""
    translation, encode = pair(target, draft).translation, TOKENIZERS[target].encode
    known = translation.translate(encode("  x\nxy"), Translated())
    for text in ("  x\n  x", "  x\n\n\tx", "  x\nxz", "  x\n", "  x"):
        assert translation.translate(encode(text), known).ids == translation.translate(encode(text), Translated()).ids


@pytest.mark.parametrize("larger", [0, 1])
def test_tokens_that_a_model_has_no_row_for_are_not_shared(larger: int) -> None:
    """Some checkpoints have a token for padding that was added to the tokenizer alone."""
    both, names = (TOKENIZERS["bytes"], TOKENIZERS["pieces"]), ["bytes", "pieces"]
    sizes = [max(tokenizer.get_vocab().values()) + 1 - (number == larger) for number, tokenizer in enumerate(both)]
    target, own = (TabularModel(torch.zeros(1, 1).expand(1, size), name=name) for size, name in zip(sizes, names, strict=True))
    made = translated(own, both, ((), ()), target)
    lost = both[larger].added_tokens_decoder[sizes[larger]].content
    assert max(made.shared) < sizes[0] and max(made.shared.values()) < sizes[1] and lost in SPECIAL
    assert made.head(torch.zeros(1, sizes[1])).shape == (1, len(made.shared)) and len(made.own_X) == sizes[0] + 1


def test_characters_begun_are_spelled_by_bytes() -> None:
    tokenizer = TOKENIZERS["bytes"]
    translation = pair("bytes", "pieces").translation
    letters = {spelled: token for token, spelled in spelling_of(tokenizer, "bytes").bytes_of.items()}
    ids = translation.translate([letters[bytes([byte])] for byte in "é".encode()[:1]], Translated()).ids
    assert TOKENIZERS["pieces"].convert_ids_to_tokens(ids)[-1] == "<0xC3>"


def test_the_draft_s_beginning_stands_for_the_target_s() -> None:
    from tokenizers import processors

    theirs = byte_level(330, ["<begin>", "</s>"])
    theirs.bos_token = "<begin>"
    begin = theirs.bos_token_id
    theirs.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", begin)]
    )
    ours = pieces(370, SPECIAL)
    ours.bos_token = "<s>"
    made = translated(model("bytes"), (ours, theirs), ((), ()), model("pieces"))
    text = [ours.bos_token_id, *ours.encode("the fox", add_special_tokens=False)]
    assert made.translation.translate(text, Translated()).ids == theirs.encode("the fox") and theirs.encode("a")[0] == begin
    # A text for the draft has two tokens at least.
    assert made.translation.translate(text[:1], Translated()).ids == [begin, begin]


def test_special_tokens_meet_by_name_and_ends_of_text_always() -> None:
    ours, theirs = (spelling_of(TOKENIZERS[name], name) for name in ("bytes", "fewer"))
    shared = shared_tokens(ours, theirs, [ours.special["</s>"]], [theirs.special["<end>"]])
    assert shared[ours.special["</s>"]] == theirs.special["<end>"]
    assert ours.special["</s>"] not in shared_tokens(ours, theirs, [ours.special["</s>"]], [])
    assert ours.special["<s>"] not in shared


def test_nearly_the_same_vocabulary_needs_no_translation() -> None:
    ours = {f"t{number}": number for number in range(640)}
    assert have_same_numbers(ours, ours | {"more": 640})
    assert not have_same_numbers(ours, ours | {"t3": 4, "t4": 3}), "two have changed places"
    assert not have_same_numbers(ours, ours | {f"more{number}": 640 + number for number in range(11)})


def test_drafts_that_share_too_little_are_refused_by_name() -> None:
    other = byte_level(256 + 20, ["</s>"], ["qqqq zzzz"])
    far = {f"w{number}": number for number in range(9000)}
    message = r"draft 'mine' and target 'theirs' have different vocabularies and share \d+ of the target's 9000 tokens; .* 5%"
    with pytest.raises(UsageError, match=message):
        check_vocabularies(far, other.get_vocab(), "theirs", "mine")
    check_vocabularies(far, {}, "theirs", "mine")  # one that is not known yet
    check_vocabularies(TOKENIZERS["pieces"].get_vocab(), TOKENIZERS["bytes"].get_vocab(), "theirs", "mine")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a")))
    with pytest.raises(UsageError, match="tokenizer of 'words' is neither byte-level nor SentencePiece's"):
        spelling_of(words, "words")
    draft: Any = pair("bytes", "pieces")
    with pytest.raises(UsageError, match="beam search needs a draft with the target's tokenizer, but 'pieces' has another"):
        refuse_translated(draft, "beam search")
