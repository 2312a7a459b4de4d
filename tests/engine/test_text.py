import pytest

import polydraft
from polydraft.engine.text import TextAssembler


class ByteTokenizer:
    """Token ids are bytes; 256 is special."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextAssembler]:
    assembler = TextAssembler(ByteTokenizer(), stop)
    pieces = []
    for byte in text.encode():
        pieces.append(assembler.add(byte))
        if assembler.stopped:
            break
    pieces.append(assembler.finish())
    return pieces, assembler


@pytest.mark.parametrize("text", ["plain words", "Zürich, 東京, 🙂 and on", "x" * 100 + "é" * 50])
def test_pieces_make_up_the_text_and_no_character_is_torn(text: str) -> None:
    pieces, assembler = feed(text)
    assert "".join(pieces) == assembler.text == text
    assert all("\ufffd" not in piece for piece in pieces)


class SpacedTokenizer:
    """Words with a space before, which is dropped at the beginning of a decoding, as SentencePiece tokenizers do."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(tokens))
        return "".join(f" {token}" for token in tokens)[1:]


def test_long_texts_take_no_longer_decodings() -> None:
    tokenizer = SpacedTokenizer()
    assembler = TextAssembler(tokenizer, [])
    pieces = [assembler.add(token) for token in range(200)]
    assert "".join(pieces) == assembler.text == " ".join(map(str, range(200)))
    assert tokenizer.longest < 40


def test_every_token_is_released_at_once_without_stop_strings() -> None:
    pieces, _ = feed("abc")
    assert pieces == ["a", "b", "c", ""]


@pytest.mark.parametrize(("text", "stop", "kept"), [
    ("one END two", ("END",), "one "),
    ("EN EN END", ("END",), "EN EN "),
    ("aaab", ("aab",), "a"),
    ("first. second", ("cond", "."), "first"),
    ("no stop here", ("END",), "no stop here"),
    ("ends in a beginning EN", ("END",), "ends in a beginning EN"),
    ("z" * 200 + "END", ("END",), "z" * 200),
])  # fmt: skip
def test_text_ends_before_the_first_stop_string_and_no_part_of_it_is_released(
    text: str, stop: tuple[str, ...], kept: str
) -> None:
    pieces, assembler = feed(text, stop)
    assert "".join(pieces) == assembler.text == kept
    assert assembler.stopped == (kept != text)


def test_without_a_tokenizer_there_is_no_text() -> None:
    assembler = TextAssembler(None, ())
    assert assembler.add(5) == "" and assembler.finish() == ""


def test_a_stop_string_at_the_very_beginning_is_held_back() -> None:
    pieces, assembler = feed("abcdef", ("abcdef",))
    assert (pieces, assembler.text) == ([""] * 7, "")


def test_the_string_of_a_special_token_stops_at_that_token() -> None:
    class Special(ByteTokenizer):
        all_special_tokens = ("<end>",)

        def convert_tokens_to_ids(self, token: str) -> int:
            return 256

    assembler = TextAssembler(Special(), ["<end>"])
    assert [assembler.add(token) for token in (104, 105, 256)] == ["h", "i", ""]
    assert assembler.stopped and assembler.text == "hi"


def test_every_row_has_its_own_stop_strings(tiny: str) -> None:
    decoder = polydraft.load(tiny, draft="none")
    options = {"sampling": polydraft.SamplingParams(), "max_new_tokens": 40, "seed": [3, 3, 3]}
    whole = decoder.generate(["hello"] * 3, **options)[0].text
    first, second = whole[4:6], whole[9:11]
    results = decoder.generate(["hello"] * 3, stop=[[first], second, []], **options)
    assert [result.text for result in results] == [whole.split(first)[0], whole.split(second)[0], whole]
    assert [str(result.stop_reason) for result in results][:2] == ["stop", "stop"]
