"""Texts that follow a grammar: a logits processor that masks, node by node, which tokens may come next.

It masks the draft's distributions as well as the target's, and before children are drawn. So drafted tokens follow the grammar,
too, and verification is as exact as without one.
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
_MOST_TRIED = 64
"""Most steps along the common beginning of all texts that are tried when a grammar is compiled."""
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: the usual way, and without white space that could go on for ever."""


@dataclass(frozen=True)
class Grammar:
    """A grammar for texts, as `SamplingParams(grammar=...)` takes it; needs ``pip install 'polydraft[serve]'``.

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
        """Return the grammar of JSON texts that fit a schema."""
        return cls(JSON_SCHEMA, schema)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Return the grammar of all JSON objects."""
        return cls(JSON_OBJECT)

    @classmethod
    def regex(cls, expression: str) -> "Grammar":
        """Return the grammar of texts that match a regular expression as a whole."""
        return cls(REGEX, expression)

    @classmethod
    def lark(cls, rules: str) -> "Grammar":
        """Return a grammar given in Lark's notation."""
        return cls(LARK, rules)


class GrammarError(UsageError):
    """A grammar that no text can follow to its end, or that is too large for llguidance."""


class Grammars:
    """Grammars for the tokens of one model.

    Parameters
    ----------
    tokenizer : Hugging Face tokenizer
    vocab_size : int
        Size of the target's vocabulary.
    eos_token_ids : sequence of int
        Tokens that end a text; allowed where the text is complete.
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
        """Check a grammar and return it in the form that `processor` takes.

        The check follows the common beginning of all its texts. That finds most grammars that are too large for llguidance, or
        that no text can follow, before any text is written.
        """
        from llguidance import LLMatcher

        kind, given = wanted.kind, wanted.given
        try:
            if kind == REGEX:
                grammar = LLMatcher.grammar_from_regex(given)
            elif kind == LARK:
                grammar = LLMatcher.grammar_from_lark(given)
            else:
                schema = {"type": "object"} if kind == JSON_OBJECT else given
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=STYLE)
            self._try(self._matcher(grammar))
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{kind} {shown(given)} cannot be used ({reason}); see llguidance's documentation") from None
        return str(grammar)

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, grammar, log_level=0)

    def _try(self, matcher: Any) -> None:
        """Follow the tokens that are certain from the start; raise `GrammarError` if that fails."""
        for _ in range(_MOST_TRIED):
            _followers(matcher, self._vocab_size)
            certain = bytes(matcher.compute_ff_bytes())
            if not certain:
                return
            # Special tokens have no bytes; if one is certain, compute_ff_tokens returns it.
            tokens = matcher.compute_ff_tokens() or self._tokenizer.tokenize_bytes(certain)
            if not matcher.consume_tokens(tokens):
                raise GrammarError(_reason(matcher))

    def processors(self, wanted: Sequence[Grammar | None], prompt_lengths: Sequence[int]) -> list["GrammarProcessor | None"]:
        """Return a processor for each text of a batch; all texts must have a grammar."""
        grammars = [grammar for grammar in wanted if grammar is not None]
        if len(grammars) < len(wanted):
            raise UsageError("some texts of this batch have a grammar, and others do not; generate them separately")
        compiled = {id(grammar): self.compiled(grammar) for grammar in grammars}
        return [self.processor(compiled[id(grammar)], length) for grammar, length in zip(grammars, prompt_lengths, strict=True)]

    def processor(self, grammar: str, prompt_length: int) -> "GrammarProcessor":
        """Return the processor of one text, which follows the grammar from the end of its prompt on."""
        return GrammarProcessor(self._matcher(grammar), prompt_length, self._vocab_size)


def _followers(matcher: Any, vocab_size: int) -> Tensor:
    """Return a mask of the tokens that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed_V = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool))
    # On an error, llguidance allows the end of the text.
    if matcher.is_error() or not bool(allowed_V.any()):
        raise GrammarError(_reason(matcher))
    return allowed_V


def _reason(matcher: Any) -> str:
    """Return in one line why a text cannot go on."""
    told = " ".join(matcher.get_error().split("<state>")[0].split())
    return "no text follows it" if not told or told.startswith("NoExtension") else told


class GrammarProcessor:
    """Logits processor of one text that rules out tokens with which the text would leave the grammar.

    States of the grammar are cached by the tokens that led there, so the nodes of a tree share those of their ancestors.

    Raises
    ------
    GrammarError
        If no token may come next, or llguidance cannot tell which: scores never pass unmasked.
    """

    def __init__(self, matcher: Any, prompt_length: int, vocab_size: int) -> None:
        self._start, self._prompt_length, self._vocab_size = matcher, prompt_length, vocab_size
        self._states: OrderedDict[tuple[int, ...], tuple[Any, Tensor] | GrammarError] = OrderedDict()

    def __call__(self, input_ids: Tensor, scores_1V: Tensor) -> Tensor:
        """Return the scores, with minus infinity for tokens that the grammar rules out."""
        state = self._state(tuple(input_ids[0, self._prompt_length :].tolist()))
        if isinstance(state, GrammarError):
            raise state
        return scores_1V.masked_fill(~state[1].to(scores_1V.device), -torch.inf)

    def forced(self, text: Sequence[int], most: int) -> list[int]:
        """Return the next tokens as far as the grammar leaves no choice, at most `most` of them."""
        state = self._state(tuple(text[self._prompt_length :]))
        return [] if isinstance(state, GrammarError) else list(state[0].deep_copy().compute_ff_tokens())[:most]

    def foresee(self, text: Sequence[int]) -> None:
        """Compute in advance which tokens may follow a text."""
        self._state(tuple(text[self._prompt_length :]))

    def _state(self, tokens: tuple[int, ...]) -> tuple[Any, Tensor] | GrammarError:
        """Return the grammar's state after some tokens and the mask of what may follow, or the error if there is none."""
        if tokens in self._states:
            self._states.move_to_end(tokens)
            return self._states[tokens]
        try:
            self._states[tokens] = self._found(tokens)
        except GrammarError as error:
            self._states[tokens] = GrammarError(
                f"the text cannot follow its grammar after {len(tokens)} new tokens ({error}); use a simpler one"
            )
        if len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)
        return self._states[tokens]

    def _found(self, tokens: tuple[int, ...]) -> tuple[Any, Tensor]:
        above = self._states.get(tokens[:-1]) if tokens else None
        start, new = (above[0], tokens[-1:]) if isinstance(above, tuple) else (self._start, tokens)
        matcher = start.deep_copy()
        if not all(matcher.consume_token(token) for token in new):
            raise GrammarError(_reason(matcher))
        return matcher, _followers(matcher, self._vocab_size)
