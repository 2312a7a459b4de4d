"""Drafts in training: a small language model, distilled, and a feature head, trained on its own outputs."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models import FeatureHead
from polydraft.models.attention import steady_attention
from polydraft.models.heads.head_folder import new_head, save_head, save_vocabulary, tokenizer_fingerprint
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded
from polydraft.sampling import PartialVocabulary
from polydraft.train.head_start import shape_for, take_over
from polydraft.train.settings import LENGTHS, DraftSize, HeadSize, TrainSettings
from polydraft.train.writer import Texts
from polydraft.trees import causal_block
from polydraft.verify import RejectionWithoutReplacement

_CHUNK_BYTES = 2**29
"""Logits over all tokens are large; so many bytes of them at a time."""
_CHUNK_ROWS, _CANDIDATES = 256, 4
"""Positions whose acceptance is measured at a time, and the candidates drawn at each."""


@dataclass(frozen=True, eq=False)
class TargetDistributions:
    """Short distributions of some positions, with the mass that a draft cannot reach."""

    probs_RD: Tensor
    """The target's probabilities of the tokens that the draft knows; they need not sum to one."""
    best_R: Tensor
    """Column of the likeliest token, or -1 where the draft does not know it."""

    def rows(self, index: Tensor | slice) -> "TargetDistributions":
        """Return the distributions of some of the positions."""
        return TargetDistributions(self.probs_RD[index], self.best_R[index])


class Teacher:
    """Read texts with the target and tell its features and distributions.

    Parameters
    ----------
    target : HFModel
    vocabulary : PartialVocabulary, optional
        What the draft knows; all tokens if not given.
    """

    def __init__(self, target: HFModel, vocabulary: PartialVocabulary | None) -> None:
        self.target, self.vocabulary = target, vocabulary
        self._column_V: Tensor | None = None
        if vocabulary is not None:
            self._column_V = torch.full((vocabulary.size,), -1, device=target.device)
            self._column_V[vocabulary.tokens_D] = torch.arange(len(vocabulary.tokens_D), device=target.device)

    @torch.no_grad()
    def features(self, tokens_BL: Tensor) -> Tensor:
        """Return the features of every position."""
        target = self.target
        if target.lean is None or target.window is not None or target.hidden_size != target.config.hidden_size:
            return target.start(*tokens_BL.shape).extend(tokens_BL, causal_block(*tokens_BL.shape, target.device))
        positions_BL = torch.arange(tokens_BL.shape[1], device=target.device).expand_as(tokens_BL)
        with steady_attention(target.device):
            return target.lean(tokens_BL, positions_BL, None, None, target.taps)

    @torch.no_grad()
    def distributions(self, features_RF: Tensor) -> TargetDistributions:
        """Return the distributions that follow some positions, given by their features."""
        rows = max(_CHUNK_BYTES // (4 * self.target.vocab_size), 1)
        parts = [self._distributions(part_RF) for part_RF in features_RF.split(rows)]  # type: ignore[no-untyped-call]
        return TargetDistributions(torch.cat([part.probs_RD for part in parts]), torch.cat([part.best_R for part in parts]))

    def _distributions(self, features_RF: Tensor) -> TargetDistributions:
        logits_RV = self.target.head(features_RF).float()
        best_R = logits_RV.argmax(-1)
        normaliser_R1 = logits_RV.logsumexp(-1, keepdim=True)
        if self.vocabulary is None or self._column_V is None:
            return TargetDistributions((logits_RV - normaliser_R1).exp(), best_R)
        short_RD = logits_RV[:, self.vocabulary.tokens_D]
        return TargetDistributions((short_RD - normaliser_R1).exp(), self._column_V[best_R])


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Chance that one of n candidates is accepted."""

    greedy_1: float
    """At temperature 0, one candidate."""
    greedy_4: float
    sampled_1: float
    """At temperature 1, one candidate."""
    sampled_4: float
    """At temperature 1, four candidates drawn without replacement (MCSD Algorithm 2)."""

    def __str__(self) -> str:
        return f"α@1 {self.greedy_1:.2f}/{self.sampled_1:.2f}, α@4 {self.greedy_4:.2f}/{self.sampled_4:.2f} (T=0/T=1)"


def acceptance_of(distributions: TargetDistributions, logits_RD: Tensor, seed: int = 0) -> Acceptance:
    """Measure a draft's logits against the target's distributions at the same positions.

    The rate with four candidates is exact given the candidates: the mass that verification puts on them.
    """
    generator = torch.Generator(logits_RD.device).manual_seed(seed)
    top_R4 = logits_RD.topk(min(_CANDIDATES, logits_RD.shape[1]), dim=-1).indices
    hits_R4 = top_R4 == distributions.best_R[:, None]
    sampled_1, sampled_4 = [], []
    scheme = RejectionWithoutReplacement()
    for first in range(0, len(logits_RD), _CHUNK_ROWS):
        probs_RD, draft_RD = (
            distributions.probs_RD[first : first + _CHUNK_ROWS],
            logits_RD[first : first + _CHUNK_ROWS].float().softmax(-1),
        )
        sampled_1.append(torch.minimum(probs_RD, draft_RD).sum(-1))
        # One more column for all tokens that the draft does not know.
        rest_R1 = (1 - probs_RD.double().sum(-1, keepdim=True)).clamp(min=0)
        target_RX = torch.cat([probs_RD.double(), rest_R1], dim=-1)
        draft_RX = torch.nn.functional.pad(draft_RD, (0, 1))
        uniforms_RK = torch.rand(len(draft_RX), _CANDIDATES, generator=generator, device=generator.device, dtype=torch.float64)
        children_RK = scheme.draw(draft_RX, uniforms_RK)
        distribution_RX = scheme.distribution(target_RX, draft_RX, children_RK)
        sampled_4.append((distribution_RX.gather(1, children_RK.clamp(min=0)) * (children_RK >= 0)).sum(-1))
    return Acceptance(
        greedy_1=hits_R4[:, 0].double().mean().item(),
        greedy_4=hits_R4.any(-1).double().mean().item(),
        sampled_1=torch.cat(sampled_1).mean().item(),
        sampled_4=torch.cat(sampled_4).mean().item(),
    )


@dataclass(frozen=True, eq=False)
class Lesson:
    """What there is to learn from some texts: R positions in answers, in the order of the text."""

    distributions: TargetDistributions
    follows_R: Tensor
    """Whether the position before is one of them too."""
    outputs: list[tuple[Tensor, Tensor]]
    """For each depth of drafting some of the R, and the draft's outputs there."""


class Pupil(ABC):
    """A draft in training: computes its logits along texts, at one or several depths of drafting."""

    module: nn.Module
    """What is trained."""
    teacher: Teacher
    depths: int = 1
    """Depths of drafting to train at."""

    def prime(self, texts: Texts) -> None:
        """Look at some text before the first step, to start from the right scales."""
        return

    @abstractmethod
    def study(self, texts: Texts, depths: int) -> Lesson:
        """Run the draft along the texts."""

    @abstractmethod
    def logits(self, outputs_RH: Tensor) -> Tensor:
        """Turn outputs into logits of the tokens that the draft knows."""

    def lesson(self, texts: Texts, depths: int) -> tuple[TargetDistributions, list[tuple[Tensor, Tensor]]]:
        """Return the target's distributions at the answers' positions, and for each depth their rows and the draft's logits."""
        lesson = self.study(texts, depths)
        return lesson.distributions, [(rows_R, self.logits(outputs_RH)) for rows_R, outputs_RH in lesson.outputs]

    @abstractmethod
    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write the draft into a folder, for use."""


class DraftPupil(Pupil):
    """A small causal language model in training, with the target's tokenizer.

    Its attention is a sliding window as long as the training texts: it need not guess what lies beyond.
    """

    def __init__(self, settings: TrainSettings, target: Loaded, vocabulary: PartialVocabulary | None) -> None:
        from transformers import MistralConfig, MistralForCausalLM

        assert isinstance(settings.size, DraftSize)
        width, config = settings.size.width, target.model.config
        head_size = next(size for size in (64, 32) if width % size == 0)
        self._tokenizer, self._vocabulary = target.tokenizer, vocabulary
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            self.model: Any = MistralForCausalLM(
                MistralConfig(
                    vocab_size=target.model.vocab_size,
                    hidden_size=width,
                    num_hidden_layers=settings.size.layers,
                    num_attention_heads=width // head_size,
                    num_key_value_heads=width // head_size,
                    head_dim=head_size,
                    intermediate_size=3 * width,
                    max_position_embeddings=int(getattr(config, "max_position_embeddings", 8192)),
                    sliding_window=settings.length,
                    tie_word_embeddings=True,
                    bos_token_id=target.tokenizer.bos_token_id,
                    eos_token_id=list(target.eos_token_ids) or None,
                    pad_token_id=None,
                    initializer_range=width**-0.5 / 2,
                )
            )
        self.module = self.model.to(target.model.device)
        _take_embeddings(self.model.get_input_embeddings().weight, target.model.hf_model.get_input_embeddings().weight)
        self.teacher = Teacher(target.model, vocabulary)

    def study(self, texts: Texts, depths: int) -> Lesson:
        """Run the draft along the texts."""
        device = self.teacher.target.device
        tokens_BL, answer_BL = texts.tokens_NL.to(device).long(), texts.answer_NL.to(device)
        asked_BL = functional.pad(answer_BL[:, 1:], (0, 1))
        distributions = self.teacher.distributions(self.teacher.features(tokens_BL)[asked_BL])
        hidden_BLH = self.model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state[asked_BL]
        return Lesson(distributions, _follows(asked_BL), [(torch.arange(len(hidden_BLH), device=device), hidden_BLH)])

    def logits(self, outputs_RH: Tensor) -> Tensor:
        """Apply the draft's output head, or a part of it."""
        table_VH = self.model.get_output_embeddings().weight
        table_DH = table_VH if self._vocabulary is None else table_VH[self._vocabulary.tokens_D]
        return functional.linear(outputs_RH, table_DH)

    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write an ordinary Hugging Face folder, in bfloat16."""
        model = copy.deepcopy(self.model).to(torch.bfloat16)
        for key, value in details.items():
            setattr(model.config, key, value)
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        if self._vocabulary is not None:
            save_vocabulary(self._vocabulary, folder)


@torch.no_grad()
def _take_embeddings(own_VW: Tensor, target_VH: Tensor) -> None:
    """Start from the target's embeddings: their main directions, as many as the draft has room for."""
    source_VH = target_VH.float()
    centred_VH = source_VH - source_VH.mean(0)
    width = min(own_VW.shape[1], source_VH.shape[1])
    _, directions_HH = torch.linalg.eigh(centred_VH.T @ centred_VH)
    projected_VW = centred_VH @ directions_HH.flip(1)[:, :width]
    own_VW.zero_()
    own_VW[: len(projected_VW), :width] = projected_VW / projected_VW.std() * own_VW.shape[1] ** -0.5


class HeadPupil(Pupil):
    """A feature head in training, on its own outputs (EAGLE-3 §3.2: training-time test)."""

    def __init__(self, settings: TrainSettings, target: Loaded, vocabulary: PartialVocabulary | None) -> None:
        assert isinstance(settings.size, HeadSize)
        self.depths, self._tokenizer = settings.size.rollouts, target.tokenizer
        longest = settings.length * (LENGTHS[-1] if settings.prompts else 1)
        shape = shape_for(settings.size, longest, target)
        target.model.tap(shape.taps)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            self.head = new_head(shape, target.model, vocabulary, "feature head")
        self.head.float().to(target.model.device)
        self._start = settings.size.start
        self.module: FeatureHead = self.head
        self.teacher = Teacher(target.model, vocabulary)

    @torch.no_grad()
    def prime(self, texts: Texts) -> None:
        """Let outputs begin at the scale of the target's hidden states, channel by channel, as its output head expects."""
        tokens_BL = texts.tokens_NL[:4].to(self.head.device).long()
        hidden_BLH = self.teacher.features(tokens_BL)[:, 1:, : self.head.shape.hidden_size].float()
        self.head.output_norm.weight.copy_(hidden_BLH.square().mean((0, 1)).sqrt())
        if self._start is not None:
            features_BLF = self.teacher.features(tokens_BL)[:, 1:].float()
            take_over(self.head, self._start, features_BLF, self._tokenizer)

    def study(self, texts: Texts, depths: int) -> Lesson:
        """Run the head along the texts; entry i (features i, token i + 1) answers for the distribution after token i + 1.

        At depth d an entry takes the output of depth d − 1 one entry earlier for its features, and attends, as inside a tree,
        to entries of depth 0 up to d places back and to one of each depth between.
        """
        device = self.head.device
        tokens_BL, answer_BL = texts.tokens_NL.to(device).long(), texts.answer_NL.to(device)
        features_BLF = self.teacher.features(tokens_BL)
        # Two entries at the end answer for nothing: products are faster if their sizes are as round as the texts'.
        asked_BL = functional.pad(answer_BL[:, 2:], (0, 2))
        distributions = self.teacher.distributions(features_BLF.roll(-1, 1)[asked_BL])
        rows_BL = torch.full(asked_BL.shape, -1, device=device).masked_scatter(
            asked_BL, torch.arange(len(distributions.best_R), device=device)
        )
        following_BL = functional.pad(tokens_BL[:, 1:], (0, 1))
        positions_BL = torch.arange(tokens_BL.shape[1], device=device).expand_as(tokens_BL)
        mixed = torch.is_autocast_enabled(device.type)
        fused_BLH = self.head.fused(features_BLF if mixed else features_BLF.to(self.head.dtype))
        keys, values, outputs = [], [], []
        for depth in range(depths):
            passing_BLH, normed_BLX = self.head.entry(fused_BLH, following_BL)
            query, key, value = self.head.projected(normed_BLX, positions_BL)
            keys.append(key)
            values.append(value)
            mixed_BHLC = _attended(query, keys, values, self.head.shape.window)
            outputs_BLH = self.head.finished(passing_BLH, mixed_BHLC.transpose(1, 2).flatten(2))
            asked_here_BL = asked_BL.clone()
            asked_here_BL[:, :depth] = False  # there is no text so far back
            outputs.append((rows_BL[asked_here_BL], outputs_BLH[asked_here_BL]))
            fused_BLH = functional.pad(outputs_BLH[:, :-1], (0, 0, 1, 0))
        return Lesson(distributions, _follows(asked_BL), outputs)

    def logits(self, outputs_RH: Tensor) -> Tensor:
        """Apply the target's output head, or a part of it."""
        return self.head.head(outputs_RH)

    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write the head."""
        save_head(self.head, folder, tokenizer_fingerprint(self._tokenizer), details)


def _follows(asked_BL: Tensor) -> Tensor:
    """Return for each position that is asked for, in order, whether the one before it is too; the last of a text never is."""
    place_R = asked_BL.flatten().nonzero()[:, 0]
    return functional.pad(place_R[1:] - place_R[:-1] == 1, (1, 0)) if len(place_R) else place_R.bool()


def _attended(query_BHLC: Tensor, keys: list[Tensor], values: list[Tensor], window: int) -> Tensor:
    """Mix values for entries of one depth, given the keys and values `[B, K, L, C]` of this and all depths above it.

    An entry sees those of depth 0 that are as many places back as it is deep, or more, and one of each depth between: the
    former by products of matrices, the latter, which stand on diagonals, place by place.
    """
    (batch_size, _, length, channels), depth = query_BHLC.shape, len(keys) - 1
    if depth == 0 and length <= window:
        return functional.scaled_dot_product_attention(query_BHLC, keys[0], values[0], is_causal=True, enable_gqa=True)
    query_BKGLC = query_BHLC.reshape(batch_size, keys[0].shape[1], -1, length, channels) * channels**-0.5
    place_L = torch.arange(length, device=query_BHLC.device)
    back_LS = place_L[:, None] - place_L
    far_BKXS = query_BKGLC.flatten(2, 3) @ keys[0].transpose(-1, -2)
    far_BKGLS = far_BKXS.view(*query_BKGLC.shape[:4], length).float()
    far_BKGLS = far_BKGLS.masked_fill((back_LS < depth) | (back_LS >= window), -torch.inf)
    near = []
    for level in range(1, depth + 1):
        # Entries before the text began see themselves, at least; their outputs are not used, but must be numbers.
        score_BKGL = (query_BKGLC * _later(keys[level], depth - level)[:, :, None]).sum(-1).float()
        near.append(score_BKGL.masked_fill(place_L < depth - level, -torch.inf))
    peak_BKGL = torch.stack([far_BKGLS.amax(-1), *near]).amax(0).detach()
    weights_BKGLS = (far_BKGLS - peak_BKGL[..., None]).exp()
    total_BKGL = weights_BKGLS.sum(-1)
    mixed_BKXC = weights_BKGLS.flatten(2, 3).to(values[0].dtype) @ values[0]
    mixed_BKGLC = mixed_BKXC.view(query_BKGLC.shape)
    for level, score_BKGL in enumerate(near, start=1):
        weight_BKGL = (score_BKGL - peak_BKGL).exp()
        total_BKGL = total_BKGL + weight_BKGL
        mixed_BKGLC = mixed_BKGLC + weight_BKGL[..., None] * _later(values[level], depth - level)[:, :, None]
    mixed_BHLC: Tensor = (mixed_BKGLC / total_BKGL[..., None]).view(query_BHLC.shape)
    return mixed_BHLC.to(query_BHLC.dtype)


def _later(states_BKLC: Tensor, places: int) -> Tensor:
    """Let every entry see what stood some places before it."""
    return functional.pad(states_BKLC[:, :, : states_BKLC.shape[2] - places], (0, 0, places, 0))
