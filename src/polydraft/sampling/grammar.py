"""Texts that follow a grammar: which tokens may come next, node by node, as a logits processor.

Because it masks the draft's distributions as well as the target's, and before children are drawn, what is drafted follows the
grammar too, and verification is as exact as without one.
"""

import copy
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import UsageError, shown, unknown_name

JSON_SCHEMA, JSON_OBJECT, REGEX, LARK = "json_schema", "json_object", "regex", "grammar"
KINDS = (JSON_SCHEMA, JSON_OBJECT, REGEX, LARK)
_MOST_STATES = 512
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spelled: as most of it is, and so that no text can go on with blanks for ever."""


@dataclass(frozen=True)
class Grammar:
    """What texts are to follow, for `SamplingParams(grammar=...)`; needs ``pip install 'polydraft[serve]'``.

    Examples
    --------
    >>> sampling = SamplingParams(grammar=Grammar.json_schema({"type": "boolean"}))  # doctest: +SKIP
    """

    kind: str
    """One of `KINDS`."""
    given: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("kind of grammar", str(self.kind), KINDS)
        fits = {JSON_SCHEMA: isinstance(self.given, Mapping | bool), JSON_OBJECT: self.given is None}
        if not fits.get(self.kind, isinstance(self.given, str)):
            allowed = {JSON_SCHEMA: "a JSON schema as a dict", JSON_OBJECT: "nothing"}.get(self.kind, "text")
            raise UsageError(f"{self.kind} {shown(self.given)} is not a grammar; allowed: {allowed}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> "Grammar":
        """Texts are JSON of a schema."""
        return cls(JSON_SCHEMA, schema)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Texts are JSON objects."""
        return cls(JSON_OBJECT)

    @classmethod
    def regex(cls, expression: str) -> "Grammar":
        """Whole texts match a regular expression."""
        return cls(REGEX, expression)

    @classmethod
    def lark(cls, rules: str) -> "Grammar":
        """Texts follow a grammar in Lark's notation."""
        return cls(LARK, rules)


class Grammars:
    """Grammars for the tokens of one model.

    Parameters
    ----------
    tokenizer : Hugging Face tokenizer
    vocab_size : int
        The target's.
    eos_token_ids : sequence of int
        What ends a text; allowed where the grammar is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise UsageError("grammars need llguidance; install it with: pip install 'polydraft[serve]'") from None
        if not eos_token_ids:
            raise UsageError("grammars need a token that ends texts, and this model has none")
        self._vocab_size = vocab_size
        try:
            self._tokenizer = from_tokenizer(copy.deepcopy(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise UsageError(f"grammars do not work with this tokenizer ({error})") from None

    def compiled(self, wanted: Grammar) -> str:
        """Check a grammar and return it in the form that `processor` takes."""
        from llguidance import LLMatcher

        kind, given = wanted.kind, wanted.given
        try:
            if kind == REGEX:
                grammar = LLMatcher.grammar_from_regex(given)
            elif kind == LARK:
                grammar = LLMatcher.grammar_from_lark(given)
            else:
                schema = {"type": "object"} if kind == JSON_OBJECT else given
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_STYLE)
            wrong = LLMatcher.validate_grammar(grammar, self._tokenizer)
        except (ValueError, TypeError) as error:
            wrong = str(error)
        if wrong:
            raise UsageError(
                f"{kind} {shown(given)} cannot be used ({' '.join(wrong.split())}); see llguidance's documentation"
            )
        return str(grammar)

    def processor(self, grammar: str, prompt_length: int) -> "GrammarProcessor":
        """Return what keeps one text to a grammar, from the end of its prompt on."""
        from llguidance import LLMatcher

        return GrammarProcessor(LLMatcher(self._tokenizer, grammar), prompt_length, self._vocab_size)


class GrammarProcessor:
    """Rule out tokens that no text of the grammar goes on with; a logits processor of one text.

    States of the grammar are kept by the tokens that led there: nodes of a tree share those of their ancestors.
    """

    def __init__(self, matcher: Any, prompt_length: int, vocab_size: int) -> None:
        self._start, self._prompt_length, self._vocab_size = matcher, prompt_length, vocab_size
        self._states: OrderedDict[tuple[int, ...], tuple[Any, Tensor] | None] = OrderedDict()

    def __call__(self, input_ids: Tensor, scores_1V: Tensor) -> Tensor:
        """Mask the scores after a text."""
        state = self._state(tuple(input_ids[0, self._prompt_length :].tolist()))
        if state is None:  # a node that no walk reaches: its token was ruled out above it
            return scores_1V
        return scores_1V.masked_fill(~state[1].to(scores_1V.device), -torch.inf)

    def forced(self, text: Sequence[int], most: int) -> list[int]:
        """Return the tokens that a text goes on with as far as its grammar leaves it no choice, `most` of them at most."""
        state = self._state(tuple(text[self._prompt_length :]))
        return [] if state is None else list(state[0].compute_ff_tokens())[:most]

    def foresee(self, text: Sequence[int]) -> None:
        """Find out beforehand what may follow a text."""
        self._state(tuple(text[self._prompt_length :]))

    def _state(self, tokens: tuple[int, ...]) -> tuple[Any, Tensor] | None:
        """Return the grammar's state after some tokens with what may follow; None if they do not follow it themselves."""
        if tokens in self._states:
            self._states.move_to_end(tokens)
            return self._states[tokens]
        above = self._states.get(tokens[:-1]) if tokens else None
        matcher = (self._start if above is None else above[0]).deep_copy()
        fits = all(matcher.consume_token(token) for token in (tokens if above is None else tokens[-1:]))
        found = None
        if fits and not matcher.is_error():
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
            found = matcher, torch.from_numpy(allowed)
        self._states[tokens] = found
        if len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)
        return found
