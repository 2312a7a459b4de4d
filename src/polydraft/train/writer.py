"""Writing training texts with the target itself: many at a time, both sides of conversations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polydraft.devices import captures
from polydraft.engine.graphs import GraphCache
from polydraft.errors import FailureError
from polydraft.models.hf import HFModel
from polydraft.models.language_model import Context
from polydraft.trees import causal_block

Advance = Callable[[int], None]
"""Called with the number of tokens just written."""
_MARKS = "polydraftuserturn", "polydraftanswer", "polydraftsecondturn"
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)
"""Temperatures of answers, all equally likely, because drafts must work at all temperatures."""

_USER_SHARE, _ANSWER_SHARE = 1 / 6, 1 / 2
"""Longest turns as shares of a text, so that it has room for at least a question and most of an answer."""
_LEAST_LOG_SHARE = -4.0
"""In the user's turns, tokens less likely than e^-4 times the likeliest are dropped; otherwise small models drift off."""
_PREFILL_TOKENS = 2**16
"""Most prompt tokens to read at a time, to save memory."""

_USER, _ANSWER = 0, 1


@dataclass(frozen=True)
class ChatForm:
    """The tokens around turns: before the first question, between question and answer, and before the next question."""

    opening: list[int]
    to_answer: list[int]
    to_user: list[int]


def chat_form(tokenizer: Any) -> ChatForm | None:
    """Derive the form from a rendered conversation; None if there is no template or it alters the turns."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), _MARKS, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if any(text.count(mark) != 1 for mark in _MARKS):
        return None
    parts = []
    for mark in _MARKS:
        part, text = text.split(mark)
        parts.append(list(tokenizer(part, add_special_tokens=False)["input_ids"]))
    return ChatForm(*parts) if all(parts) else None


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts of equal length."""

    tokens_NL: Tensor
    answer_NL: Tensor
    """Which tokens are part of an answer by the target; drafts are trained on these."""

    def rows(self, index: Any) -> "Texts":
        """Return some of the texts."""
        return Texts(self.tokens_NL[index], self.answer_NL[index])

    @classmethod
    def joined(cls, parts: Sequence["Texts"]) -> "Texts":
        """Put texts of one length together."""
        return cls(torch.cat([part.tokens_NL for part in parts]), torch.cat([part.answer_NL for part in parts]))


@contextmanager
def enough_memory(task: str, option: str) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a message that names the option to lower."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise FailureError(f"too little GPU memory is free to {task}; use a smaller {option}") from None


class Writer:
    """Lets a model write texts, all rows in lockstep and without a sync, so that steps can be captured on a GPU.

    Without a form it writes plain text. End tokens end a turn or a text.
    """

    def __init__(self, target: HFModel, form: ChatForm | None, end_tokens: Sequence[int]) -> None:
        self._target, self._form, device = target, form, target.device
        ends = set(end_tokens) | ({form.to_answer[0], form.to_user[0]} if form else set())
        self._ends_E = torch.tensor(sorted(ends), dtype=torch.long, device=device)
        self._temperatures_X = torch.tensor(ANSWER_TEMPERATURES, device=device)
        bridges = [form.to_answer, form.to_user] if form else [[0], [0]]
        longest = max(map(len, bridges))
        self._bridges_2M = torch.tensor([bridge + [0] * (longest - len(bridge)) for bridge in bridges], device=device)
        self._lengths_2 = torch.tensor([len(bridge) for bridge in bridges], device=device)

    def write_all(
        self,
        starts: Sequence[Sequence[int]],
        length: int,
        rows: int,
        generator: torch.Generator,
        advance: Advance,
        answering: bool = False,
    ) -> Texts:
        """Continue any number of texts, `rows` at a time."""
        # Batches have starts of similar length, so that few rows idle.
        order = sorted(range(len(starts)), key=lambda row: len(starts[row]))
        parts = []
        for first in range(0, len(starts), rows):
            chosen = [starts[row] for row in order[first : first + rows]]
            with enough_memory(f"write {rows} texts of {length} tokens at a time", "--sampling-rows"):
                parts.append(self.write(chosen, length, answering, generator, advance))
        back_N = torch.empty(len(starts), dtype=torch.long)
        back_N[order] = torch.arange(len(starts))
        return Texts.joined(parts).rows(back_N)

    @torch.inference_mode()
    def write(
        self,
        starts: Sequence[Sequence[int]],
        length: int,
        answering: bool,
        generator: torch.Generator,
        advance: Advance,
    ) -> Texts:
        """Continue `starts` to `length` tokens each; the next turn is an answer if `answering`, else the user's."""
        target, device, rows = self._target, self._target.device, len(starts)
        context = target.start(rows, length)
        _prefill(context, starts)
        begun = [len(start) for start in starts]
        turn = _ANSWER if answering or self._form is None else _USER
        state = _State(starts, length, turn, target.num_columns, device)
        state.choose(generator)
        state.temperature_B.copy_(self._temperatures_X[state.choice_B])
        graphs = GraphCache() if captures(device) and target.graph_obstacle is None else None
        if graphs is not None:
            context.span = context.capacity  # one capture serves all lengths

        def step() -> Tensor:
            return self._step(state, context)

        for number in range(length - min(begun)):
            state.noise_BV.exponential_(generator=generator)
            state.choose(generator)
            if graphs is None:
                step()
                context.settle([min(size + number, length - 1) for size in begun])
            else:
                graphs.run(length, step)
            advance(rows)
        return Texts(state.tokens_BL.to("cpu", torch.int32), state.answer_BL.cpu())

    def _step(self, state: "_State", context: Context) -> Tensor:
        """Write one more token in every row."""
        rows, length = state.tokens_BL.shape
        last_B1 = state.position_B[:, None].clamp(max=length) - 1
        token_BT = state.tokens_BL.gather(1, last_B1)
        features_BTF = context.extend(token_BT, causal_block(rows, 1, token_BT.device))
        logits_BV = self._target.head(features_BTF[:, 0])
        context.advance((context.lengths_B < length - 1).long())  # rows with long starts finish early and idle
        user_B = state.turn_B == _USER
        sampled_B = _sampled(logits_BV, torch.where(user_B, 1.0, state.temperature_B), user_B, state.noise_BV)
        # A bridge is the tokens between two turns; its index is that of the turn that ended.
        bridge_B = self._bridges_2M[state.turn_B, state.forced_B.clamp(max=self._bridges_2M.shape[1] - 1)]
        token_B = torch.where(state.bridging_B, bridge_B, sampled_B)
        inside_B = state.position_B < length
        place_B1 = state.position_B.clamp(max=length - 1)[:, None]
        state.tokens_BL.scatter_(
            1, place_B1, torch.where(inside_B[:, None], token_B[:, None], state.tokens_BL.gather(1, place_B1))
        )
        fresh_B1 = (inside_B & ~state.bridging_B & ~user_B)[:, None]
        state.answer_BL.scatter_(1, place_B1, fresh_B1 | state.answer_BL.gather(1, place_B1))
        state.position_B += 1
        if self._form is not None:
            self._change_turns(state, sampled_B)
        return token_B

    def _change_turns(self, state: "_State", sampled_B: Tensor) -> None:
        """End turns at end tokens and at their limit, and begin the next ones after the bridge."""
        bridging_B = state.bridging_B.clone()
        ended_B = ~bridging_B & torch.isin(sampled_B, self._ends_E)
        cut_B = ~bridging_B & ~ended_B & (state.written_B + 1 >= state.limits_2[state.turn_B])
        # A turn that ended by itself has already written the first token of its bridge.
        state.forced_B.copy_(torch.where(bridging_B, state.forced_B + 1, ended_B.long()))
        state.written_B += (~bridging_B).long()
        bridging_B = bridging_B | ended_B | cut_B
        over_B = bridging_B & (state.forced_B >= self._lengths_2[state.turn_B])
        state.turn_B.copy_(torch.where(over_B, 1 - state.turn_B, state.turn_B))
        state.written_B.masked_fill_(over_B, 0)
        state.bridging_B.copy_(bridging_B & ~over_B)
        state.temperature_B.copy_(torch.where(over_B, self._temperatures_X[state.choice_B], state.temperature_B))


class _State:
    """The state of all rows, which a captured step reads and writes in place."""

    def __init__(self, starts: Sequence[Sequence[int]], length: int, turn: int, columns: int, device: torch.device) -> None:
        rows = len(starts)
        tokens = torch.tensor([[*start, *[0] * (length - len(start))] for start in starts], dtype=torch.int32)
        limits = [max(int(share * length), 1) for share in (_USER_SHARE, _ANSWER_SHARE)]
        zeros_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.tokens_BL = tokens.to(device).long()
        self.answer_BL = torch.zeros(rows, length, dtype=torch.bool, device=device)
        self.position_B = torch.tensor([len(start) for start in starts], device=device)
        self.turn_B = zeros_B + turn
        self.written_B = zeros_B.clone()
        """Tokens of the turn so far."""
        self.forced_B = zeros_B.clone()
        """Tokens of the bridge so far."""
        self.bridging_B = zeros_B.bool()
        self.temperature_B = zeros_B.float()
        self.choice_B = zeros_B.clone()
        """Index of the temperature for an answer that begins now."""
        self.limits_2 = torch.tensor(limits, device=device)
        """Longest turns of user and answer."""
        self.noise_BV = torch.empty(rows, columns, device=device)

    def choose(self, generator: torch.Generator) -> None:
        """Draw the temperature of each row's next answer, in case it begins in this step."""
        self.choice_B.random_(0, len(ANSWER_TEMPERATURES), generator=generator)


def _prefill(context: Context, starts: Sequence[Sequence[int]]) -> None:
    """Read all tokens of the texts but the last, some rows at a time if there are many."""
    longest = max(map(len, starts))
    if longest < 2:
        return
    shared = min(min(map(len, starts)) - 1, 1)
    if len(starts) * longest <= _PREFILL_TOKENS or shared == 0:
        context.prefill([start[:-1] for start in starts])
        return
    context.prefill([start[:1] for start in starts])  # allocates storage for the calls below
    rows = max(_PREFILL_TOKENS // longest, 1)
    for first in range(0, len(starts), rows):
        part = range(first, min(first + rows, len(starts)))
        context.prefill([start[1:-1] if row in part else [] for row, start in enumerate(starts)])


def _sampled(logits_BV: Tensor, temperature_B: Tensor, truncated_B: Tensor, noise_BV: Tensor) -> Tensor:
    """Draw one token per row by a race with exponential noise, which is overwritten; at temperature 0 take the likeliest."""
    peak_B1 = logits_BV.amax(-1, keepdim=True).float()
    lowest_B1 = torch.where(truncated_B[:, None], peak_B1 + _LEAST_LOG_SHARE, -torch.inf)
    race_BV = noise_BV.log_().mul_(-temperature_B[:, None]).add_(logits_BV)
    return race_BV.masked_fill_(logits_BV < lowest_B1, -torch.inf).argmax(-1)
