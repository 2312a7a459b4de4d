"""The texts a draft is trained on: written by the target itself, the user's turns too, or read from files."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polydraft.errors import FailureError, UsageError
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded
from polydraft.output import written_whole
from polydraft.prompts import load_prompts
from polydraft.train.settings import TrainSettings
from polydraft.trees import causal_block

logger = logging.getLogger(__name__)

Advance = Callable[[int], None]
"""Told how many tokens more have been written."""
_MARKS = "polydraftuserturn", "polydraftanswer", "polydraftsecondturn"
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.05, 64
ANSWER_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
"""Drafts must serve at all temperatures, so answers are sampled at several."""

_USER_SHARE, _ANSWER_SHARE = 1 / 6, 2 / 3
"""Longest turns, as shares of a text: each is to hold a question and most of an answer at least."""
_LEAST_SHARE = 0.02
"""In the user's turns tokens less likely than this share of the likeliest are left out: a small model drifts otherwise."""

_USER, _ANSWER = 0, 1


@dataclass(frozen=True)
class ChatForm:
    """What stands before the user's turn, between it and the answer, and between an answer and the next turn."""

    opening: list[int]
    to_answer: list[int]
    to_user: list[int]


def chat_form(tokenizer: Any) -> ChatForm | None:
    """Read the form off a rendered conversation; None where there is no template, or one that hides its turns."""
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
    """Sampled texts of equal length."""

    tokens_NL: Tensor
    answer_NL: Tensor
    """Which tokens the target wrote as answers; drafts are trained on these."""


class Writer:
    """Let a model write texts, all rows in step, without a look at the values.

    Parameters
    ----------
    target : HFModel
    form : ChatForm, optional
        Plain text without turns if not given.
    end_tokens : sequence of int
        Tokens that end a turn or a text.
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
        settings: TrainSettings,
        advance: Advance,
        answering: bool = False,
    ) -> Texts:
        """Continue any number of texts, `sampling_rows` side by side."""
        generator = torch.Generator(self._target.device).manual_seed(settings.seed)
        parts = [
            self.write(starts[first : first + settings.sampling_rows], settings.length, answering, generator, advance)
            for first in range(0, len(starts), settings.sampling_rows)
        ]
        return Texts(torch.cat([part.tokens_NL for part in parts]), torch.cat([part.answer_NL for part in parts]))

    @torch.inference_mode()
    def write(
        self,
        starts: Sequence[Sequence[int]],
        length: int,
        answering: bool,
        generator: torch.Generator,
        advance: Advance,
    ) -> Texts:
        """Continue `starts` to `length` tokens each; with `answering` the next turn is an answer, and the only one."""
        target, device, rows = self._target, self._target.device, len(starts)
        single = answering and self._form is not None
        context = target.start(rows, length)
        context.prefill([start[:-1] for start in starts])
        begun = [len(start) for start in starts]
        limits_2 = torch.tensor([max(int(share * length), 1) for share in (_USER_SHARE, _ANSWER_SHARE)], device=device)
        tokens_BL = torch.zeros(rows, length, dtype=torch.long, device=device)
        answer_BL = torch.zeros(rows, length, dtype=torch.bool, device=device)
        for row, start in enumerate(starts):
            tokens_BL[row, : len(start)] = torch.tensor(start, device=device)
        turn_B = torch.full((rows,), _ANSWER if answering or self._form is None else _USER, device=device)
        written_B, forced_B = torch.zeros_like(turn_B), torch.zeros_like(turn_B)
        bridging_B, done_B = torch.zeros_like(turn_B, dtype=torch.bool), torch.zeros_like(turn_B, dtype=torch.bool)
        temperature_B = self._new_temperatures(rows, generator)
        position_B = torch.tensor(begun, device=device)
        token_B = tokens_BL.gather(1, position_B[:, None] - 1)[:, 0]
        block = causal_block(rows, 1, device)
        for number in range(length - min(begun)):
            logits_BV = target.head(context.extend(token_B[:, None], block)[:, 0])
            context.advance((context.lengths_B < length - 1).long())  # a row that began later ends earlier, and idles
            context.settle([min(size + number, length - 1) for size in begun])
            user_B = (turn_B == _USER) if self._form is not None else torch.zeros_like(done_B)
            sampled_B = _sampled(logits_BV, torch.where(user_B, 1.0, temperature_B), user_B, generator)
            # A bridge leads from the turn that ended to the next one; its index is that of the turn that ended.
            bridge_B = self._bridges_2M[turn_B, forced_B.clamp(max=self._bridges_2M.shape[1] - 1)]
            token_B = torch.where(bridging_B, bridge_B, sampled_B)
            inside_B = position_B < length
            place_B1 = position_B.clamp(max=length - 1)[:, None]
            tokens_BL.scatter_(1, place_B1, torch.where(inside_B[:, None], token_B[:, None], tokens_BL.gather(1, place_B1)))
            fresh_B1 = (inside_B & ~bridging_B & ~done_B & (turn_B == _ANSWER))[:, None]
            answer_BL.scatter_(1, place_B1, fresh_B1 | answer_BL.gather(1, place_B1))
            position_B = position_B + 1
            if self._form is not None:
                ended_B = ~bridging_B & torch.isin(sampled_B, self._ends_E)
                cut_B = ~bridging_B & ~ended_B & (written_B + 1 >= limits_2[turn_B])
                if single:
                    done_B = done_B | ended_B | cut_B
                    written_B = written_B + 1
                else:
                    # A turn that ended by itself has already put the first token of its bridge.
                    forced_B = torch.where(bridging_B, forced_B + 1, ended_B.long())
                    written_B = torch.where(bridging_B, written_B, written_B + 1)
                    bridging_B = bridging_B | ended_B | cut_B
                    over_B = bridging_B & (forced_B >= self._lengths_2[turn_B])
                    turn_B = torch.where(over_B, 1 - turn_B, turn_B)
                    written_B, bridging_B = torch.where(over_B, 0, written_B), bridging_B & ~over_B
                    temperature_B = torch.where(over_B, self._new_temperatures(rows, generator), temperature_B)
            advance(rows)
        return Texts(tokens_BL.to("cpu", torch.int32), answer_BL.cpu())

    def _new_temperatures(self, rows: int, generator: torch.Generator) -> Tensor:
        index_B = torch.randint(len(ANSWER_TEMPERATURES), (rows,), generator=generator, device=generator.device)
        return self._temperatures_X[index_B]


def _sampled(logits_BV: Tensor, temperature_B: Tensor, truncated_B: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token per row by an exponential race; at temperature 0 the likeliest."""
    scores_BV = logits_BV.float() / temperature_B.clamp(min=1e-4)[:, None]
    weights_BV = torch.softmax(scores_BV, dim=-1)
    lowest_B1 = torch.where(truncated_B, _LEAST_SHARE, 0.0)[:, None] * weights_BV.amax(-1, keepdim=True)
    noise_BV = torch.empty_like(weights_BV).exponential_(generator=generator)
    race_BV = torch.where(weights_BV >= lowest_B1, weights_BV / noise_BV, 0.0)
    return torch.where(temperature_B > 0, race_BV.argmax(-1), logits_BV.argmax(-1))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts of equal length, in random order; the first few rows are held out."""

    texts: Texts
    source: str
    """Where they came from, for the card."""

    @property
    def held_out(self) -> int:
        """Rows that are never trained on."""
        return min(max(int(len(self.texts.tokens_NL) * _HELD_OUT_SHARE), 1), _MOST_HELD_OUT)

    def test(self) -> Texts:
        """Return the held-out texts."""
        return Texts(self.texts.tokens_NL[: self.held_out], self.texts.answer_NL[: self.held_out])

    def batch(self, step: int, size: int, seed: int) -> Texts:
        """Return the batch of a step: each epoch goes through all texts in an order of its own."""
        rows = len(self.texts.tokens_NL) - self.held_out
        places = [divmod(number, rows) for number in range(step * size, (step + 1) * size)]
        index = [_order(rows, seed + epoch)[place] + self.held_out for epoch, place in places]
        return Texts(self.texts.tokens_NL[index], self.texts.answer_NL[index])

    def frequent_tokens(self, count: int, vocab_size: int, always: Sequence[int]) -> Tensor:
        """Return the commonest answer tokens, and some in any case, ascending."""
        counts_V = torch.bincount(self.texts.tokens_NL[self.texts.answer_NL].long(), minlength=vocab_size)
        for token in always:
            counts_V[token] = counts_V.max() + 1
        return counts_V.topk(count).indices.sort().values

    def save(self, file: Path) -> None:
        """Write all of it, whole or not at all."""
        tensors = {"tokens": self.texts.tokens_NL.contiguous(), "answer": self.texts.answer_NL.to(torch.uint8).contiguous()}
        try:
            with written_whole(file) as partial:
                save_file(tensors, partial, metadata={"source": self.source})
        except (OSError, SafetensorError) as error:
            raise FailureError(f"cannot write {file} ({error}); free some space and run again") from None

    @classmethod
    def load(cls, file: Path) -> "Corpus":
        """Read it back."""
        try:
            with safe_open(file, "pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
                source = (opened.metadata() or {}).get("source", "unknown")
            texts = Texts(tensors["tokens"], tensors["answer"].bool())
        except (OSError, SafetensorError, KeyError) as error:
            raise FailureError(f"cannot read {file} ({error}); remove it to sample the texts again") from None
        return cls(texts, source)


@lru_cache(maxsize=2)
def _order(rows: int, seed: int) -> list[int]:
    """Return the order of an epoch."""
    order: list[int] = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def make_corpus(settings: TrainSettings, target: Loaded, advance: Advance) -> Corpus:
    """Sample or read the texts that the settings ask for."""
    check_length(settings.length, target)
    if settings.texts:
        return Corpus(_from_files(settings, target.tokenizer), f"the text files {', '.join(settings.texts)}")
    form = chat_form(target.tokenizer)
    rows = num_rows(max(-(-settings.tokens // settings.length), 8), settings.sampling_rows)
    if settings.prompts:
        starts = _prompts(settings, target, form is not None)
        starts = (starts * -(-rows // len(starts)))[:rows]
        source = f"answers of the target to the prompts of {settings.prompts}"
    elif form is not None:
        starts, source = [form.opening] * rows, "conversations that the target made up, both sides of them"
    else:
        logger.info("the target has no chat template: sampling plain text instead")
        starts, source = [_plain_start(target)] * rows, "plain text that the target made up (it has no chat template)"
    writer = Writer(target.model, form, target.eos_token_ids)
    texts = writer.write_all(starts, settings, advance, answering=bool(settings.prompts))
    corpus = Corpus(texts, source)
    if not corpus.test().answer_NL[:, 2:].any():
        raise UsageError(f"texts of {settings.length} tokens are too short to hold an answer of this target; raise --length")
    return corpus


def check_length(length: int, target: Loaded) -> None:
    """Refuse texts that are longer than the target's context."""
    limit = target.model.max_positions
    if limit is not None and length > limit:
        raise UsageError(f"--length {length} is longer than the target's context; allowed: 16 to {limit}")


def num_rows(rows: int, side_by_side: int) -> int:
    """Round up to whole batches: a last few rows by themselves would take as long as many."""
    return rows if rows <= side_by_side else -(-rows // side_by_side) * side_by_side


def _plain_start(target: Loaded) -> list[int]:
    start = target.tokenizer.bos_token_id
    start = target.tokenizer.eos_token_id if start is None else start
    return [0 if start is None else int(start)]


def _prompts(settings: TrainSettings, target: Loaded, chat: bool) -> list[list[int]]:
    assert settings.prompts is not None
    tokenizer, starts = target.tokenizer, []
    for prompt in load_prompts(settings.prompts, settings.prompt_limit):
        text = prompt.text
        if chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer(text, add_special_tokens=not chat)["input_ids"])
        if 0 < len(ids) <= settings.length // 2:
            starts.append(ids)
    if not starts:
        raise UsageError(
            f"no prompt of {settings.prompts} is short enough for texts of {settings.length} tokens; raise --length"
        )
    return starts


def _from_files(settings: TrainSettings, tokenizer: Any) -> Texts:
    ids: list[int] = []
    for name in settings.texts:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {name!r} as UTF-8 text ({error})") from None
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= settings.tokens:
            break
    rows = min(len(ids), settings.tokens) // settings.length
    if rows < 2:
        raise UsageError(
            f"the text files hold {len(ids)} tokens; at least {2 * settings.length} are needed, or a shorter --length"
        )
    tokens_NL = torch.tensor(ids[: rows * settings.length], dtype=torch.int32).view(rows, settings.length)
    order_N = torch.randperm(rows, generator=torch.Generator().manual_seed(settings.seed))
    return Texts(tokens_NL[order_N], torch.ones(rows, settings.length, dtype=torch.bool))
