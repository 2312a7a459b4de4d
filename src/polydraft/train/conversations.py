"""Text from the target itself: it writes the user's turns too, so no dataset is needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.models.hf import HFModel
from polydraft.train.chat_form import ChatForm
from polydraft.trees import causal_block

ANSWER_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
"""Drafts must serve at all temperatures, so answers are sampled at several."""

_USER_SHARE, _ANSWER_SHARE = 1 / 6, 2 / 3
"""Longest turns, as shares of a text: each is to hold a question and most of an answer at least."""
_LEAST_SHARE = 0.02
"""In the user's turns tokens less likely than this share of the likeliest are left out: a small model drifts otherwise."""

_USER, _ANSWER = 0, 1


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

    @torch.inference_mode()
    def write(
        self,
        starts: Sequence[Sequence[int]],
        length: int,
        answering: bool,
        generator: torch.Generator,
        step: Callable[[int], None],
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
            step(rows)
        return Texts(tokens_BL.to("cpu", torch.int32), answer_BL.cpu())

    def _new_temperatures(self, rows: int, generator: torch.Generator) -> Tensor:
        index_B = torch.randint(len(ANSWER_TEMPERATURES), (rows,), generator=generator, device=generator.device)
        return self._temperatures_X[index_B]


def _sampled(logits_BV: Tensor, temperature_B: Tensor, truncated_B: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token a row by an exponential race; at temperature 0 the likeliest."""
    scores_BV = logits_BV.float() / temperature_B.clamp(min=1e-4)[:, None]
    weights_BV = torch.softmax(scores_BV, dim=-1)
    lowest_B1 = torch.where(truncated_B, _LEAST_SHARE, 0.0)[:, None] * weights_BV.amax(-1, keepdim=True)
    noise_BV = torch.empty_like(weights_BV).exponential_(generator=generator)
    race_BV = torch.where(weights_BV >= lowest_B1, weights_BV / noise_BV, 0.0)
    return torch.where(temperature_B > 0, race_BV.argmax(-1), logits_BV.argmax(-1))
