"""One place where requests become sequences, and one rule for which of them keep their trees whatever the load."""

import ast
from pathlib import Path
from typing import Any

import pytest

import polydraft
from polydraft.certify.reference import echo_pair
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, TokenSequence
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

SOURCE = Path(polydraft.__file__).parent
PAIR = echo_pair()


class Noting(Decoder):
    """A decoder that keeps the sequences it makes."""

    made: list[TokenSequence]

    def sequence(self, *given: Any, **options: Any) -> TokenSequence:
        """Make one and keep it."""
        one = super().sequence(*given, **options)
        self.made = [*getattr(self, "made", []), one]
        return one


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("seed", [None, 3])
def test_library_and_server_hold_the_same_texts_steady(temperature: float, seed: int | None) -> None:
    decoder = Noting(PAIR.target, TreeDrafter(PAIR.draft, parse_tree("2x1")))
    sampling = SamplingParams(temperature=temperature)
    decoder.stream([[1, 2], [3]], sampling=sampling, seed=seed)
    served = decoder.sequence([1, 2], sampling, seed=5, seeded=seed is not None, max_new_tokens=4)
    # Only a seed that the user chose, and that matters, keeps trees from following the load.
    expected = seed is not None and temperature > 0
    assert served.steady == expected
    assert [one.steady for one in decoder.made[:2]] == [expected] * 2


def test_nobody_else_makes_sequences() -> None:
    calls = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "TokenSequence(" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TokenSequence"
    }
    # Processes that share a model copy the first one's sequences.
    assert calls == {"engine/decoder.py", "serve/request.py"}


def test_a_sequence_has_what_the_decoder_knows() -> None:
    decoder = Decoder(PAIR.target, eos_token_ids=[7])
    one = decoder.sequence([1, 2], SamplingParams(), seed=5, max_new_tokens=4)
    assert one.eos_token_ids == {7} and one.max_positions == PAIR.target.max_positions and one.steady
    endless = decoder.sequence([1, 2], SamplingParams(), seed=5, max_new_tokens=4, eos_token_ids=frozenset(), max_positions=3)
    assert endless.eos_token_ids == frozenset() and endless.end == 3
