"""One place where requests become sequences."""

import ast
from pathlib import Path

import polydraft
from polydraft.certify.reference import echo_pair
from polydraft.engine import Decoder
from polydraft.sampling import SamplingParams

SOURCE = Path(polydraft.__file__).parent
PAIR = echo_pair()


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
    assert one.eos_token_ids == {7} and one.max_positions == PAIR.target.max_positions
    endless = decoder.sequence([1, 2], SamplingParams(), seed=5, max_new_tokens=4, eos_token_ids=frozenset(), max_positions=3)
    assert endless.eos_token_ids == frozenset() and endless.end == 3
