"""Drafts in training: their common interface, and small language models distilled from the target."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.attention import steady_attention
from polydraft.models.heads.head_folder import save_vocabulary
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded
from polydraft.models.output_head import stands_alone
from polydraft.sampling import PartialVocabulary
from polydraft.train.settings import DraftSize, TrainSettings
from polydraft.train.writer import Texts
from polydraft.trees import causal_block
from polydraft.verify import RejectionWithoutReplacement

_CHUNK_BYTES = 2**29
"""Most bytes of logits over the whole vocabulary to hold at a time."""
_CHUNK_ROWS, _CANDIDATES = 256, 4
"""Positions whose acceptance is measured at a time, and candidates drawn at each."""
_LAYERS, _WIDTH = 3, 256
"""Default sizes of a new draft."""


@dataclass(frozen=True, eq=False)
class TargetDistributions:
    """The target's distributions at some positions, restricted to the tokens that the draft knows."""

    probs_RD: Tensor
    """The target's probabilities of the tokens that the draft knows; they need not sum to one."""
    best_R: Tensor
    """Column of the likeliest token; -1 if the draft does not know it."""

    def rows(self, index: Tensor | slice) -> "TargetDistributions":
        """Return the distributions at some of the positions."""
        return TargetDistributions(self.probs_RD[index], self.best_R[index])


class Teacher:
    """The target, as the source of features and of distributions to imitate."""

    def __init__(self, target: HFModel, vocabulary: PartialVocabulary | None) -> None:
        self.target, self.vocabulary = target, vocabulary
        self._column_V: Tensor | None = None
        if vocabulary is not None:
            self._column_V = torch.full((vocabulary.size,), -1, device=target.device)
            self._column_V[vocabulary.tokens_D] = torch.arange(len(vocabulary.tokens_D), device=target.device)

    @torch.no_grad()
    def features(self, tokens_BL: Tensor) -> Tensor:
        """Return the features at every position."""
        target = self.target
        # Lean bodies read whole texts without a cache, unless layers have windows or features are padded (inflated models).
        if target.lean is None or target.window is not None or target.hidden_size != target.config.hidden_size:
            return target.start(*tokens_BL.shape).extend(tokens_BL, causal_block(*tokens_BL.shape, target.device))
        positions_BL = torch.arange(tokens_BL.shape[1], device=target.device).expand_as(tokens_BL)
        with steady_attention(target.device):
            return target.lean(tokens_BL, positions_BL, None, None, target.taps)

    @torch.no_grad()
    def distributions(self, features_RF: Tensor) -> TargetDistributions:
        """Return the distributions of the next token at some positions, given their features."""
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
    """Probability that one of n candidates is accepted."""

    greedy_1: float
    """At temperature 0, one candidate."""
    greedy_4: float
    sampled_1: float
    """At temperature 1, one candidate."""
    sampled_4: float
    """At temperature 1, four candidates drawn without replacement (MCSD Algorithm 2)."""

    def __str__(self) -> str:
        return f"α@1 {self.greedy_1:.2f}/{self.sampled_1:.2f}, α@4 {self.greedy_4:.2f}/{self.sampled_4:.2f} (T=0/T=1)"


def acceptance_of(distributions: TargetDistributions, logits_RD: Tensor) -> Acceptance:
    """Measure how often a draft is accepted, given its logits and the target's distributions at the same positions.

    Four candidates are drawn at random, but given these, the rate is exact: it is the mass that verification puts on them.
    """
    generator = torch.Generator(logits_RD.device).manual_seed(0)
    top_R4 = logits_RD.topk(min(_CANDIDATES, logits_RD.shape[1]), dim=-1).indices
    hits_R4 = top_R4 == distributions.best_R[:, None]
    sampled_1, sampled_4 = [], []
    scheme = RejectionWithoutReplacement()
    for first in range(0, len(logits_RD), _CHUNK_ROWS):
        part = slice(first, first + _CHUNK_ROWS)
        probs_RD, draft_RD = distributions.probs_RD[part], logits_RD[part].float().softmax(-1)
        sampled_1.append(torch.minimum(probs_RD, draft_RD).sum(-1))
        # One more column stands for all tokens that the draft does not know.
        rest_R1 = (1 - probs_RD.double().sum(-1, keepdim=True)).clamp(min=0)
        target_RX = torch.cat([probs_RD.double(), rest_R1], dim=-1)
        draft_RX = functional.pad(draft_RD, (0, 1))
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
    """The target's distributions and the draft's outputs at R positions in answers, in the order of the text."""

    distributions: TargetDistributions
    follows_R: Tensor
    """Whether the position before is also one of them."""
    outputs: list[tuple[Tensor, Tensor]]
    """For each depth of drafting, the indices of the positions it covers and the draft's outputs there."""


class Pupil(ABC):
    """A draft in training, which computes logits along texts at one or several depths of drafting."""

    module: nn.Module
    """The module to train."""
    teacher: Teacher
    depths: int = 1
    """Number of depths of drafting to train."""

    def prime(self, texts: Texts) -> None:
        """Initialise scales from some texts before the first step."""
        return

    @abstractmethod
    def study(self, texts: Texts, depths: int) -> Lesson:
        """Run the draft along the texts at the first `depths` depths."""

    @abstractmethod
    def logits(self, outputs_RH: Tensor) -> Tensor:
        """Turn outputs into logits of the tokens that the draft knows."""

    @abstractmethod
    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write the draft into a folder, ready to use."""


class DraftPupil(Pupil):
    """A small causal language model in training, with the target's tokenizer: a new one, or one to fine-tune (MCSD §5)."""

    def __init__(
        self, settings: TrainSettings, target: Loaded, vocabulary: PartialVocabulary | None, start: HFModel | None
    ) -> None:
        self._tokenizer, self._vocabulary = target.tokenizer, vocabulary
        self.model: Any = new_draft(settings, target) if start is None else start.hf_model.float().requires_grad_(True)
        self.module = self.model.to(target.model.device)
        self.teacher = Teacher(target.model, vocabulary)
        with torch.no_grad():
            # If logits are scaled or capped, outputs are the logits of all tokens.
            self._splits = stands_alone(self.model, target.model.device)

    def study(self, texts: Texts, depths: int) -> Lesson:
        """Run the draft along the texts; it has only one depth."""
        device = self.teacher.target.device
        tokens_BL, answer_BL = texts.tokens_NL.to(device).long(), texts.answer_NL.to(device)
        asked_BL = functional.pad(answer_BL[:, 1:], (0, 1))
        distributions = self.teacher.distributions(self.teacher.features(tokens_BL)[asked_BL])
        if self._splits:
            outputs_RH = self.model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state[asked_BL]
        else:
            outputs_RH = self.model(input_ids=tokens_BL, use_cache=False).logits[asked_BL]
        return Lesson(distributions, follows(asked_BL), [(torch.arange(len(outputs_RH), device=device), outputs_RH)])

    def logits(self, outputs_RH: Tensor) -> Tensor:
        """Apply the draft's output head, or its rows for the tokens that the draft knows."""
        known_D = slice(None) if self._vocabulary is None else self._vocabulary.tokens_D
        if not self._splits:
            return outputs_RH[:, known_D]
        table = self.model.get_output_embeddings()
        bias_V = getattr(table, "bias", None)
        return functional.linear(outputs_RH, table.weight[known_D], None if bias_V is None else bias_V[known_D])

    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write an ordinary Hugging Face folder in bfloat16."""
        from transformers import GenerationConfig

        model = copy.deepcopy(self.model).to(torch.bfloat16)
        model.generation_config = GenerationConfig.from_model_config(model.config)  # drop sampling settings of a start model
        for key, value in details.items():
            setattr(model.config, key, value)
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        if self._vocabulary is not None:
            save_vocabulary(self._vocabulary, folder)


def new_draft(settings: TrainSettings, target: Loaded) -> Any:
    """Return an untrained model on the target's device.

    Its attention has a sliding window as long as the training texts, so that longer texts look no different to it.
    """
    from transformers import MistralConfig, MistralForCausalLM

    assert isinstance(settings.size, DraftSize)
    width, config = settings.size.width or _WIDTH, target.model.config
    head_size = next(size for size in (64, 32) if width % size == 0)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model: Any = MistralForCausalLM(
            MistralConfig(
                vocab_size=target.model.vocab_size,
                hidden_size=width,
                num_hidden_layers=settings.size.layers or _LAYERS,
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
    model = model.to(target.model.device)
    _take_embeddings(model.get_input_embeddings().weight, target.model.hf_model.get_input_embeddings().weight)
    return model


@torch.no_grad()
def _take_embeddings(own_VW: Tensor, target_VH: Tensor) -> None:
    """Initialise embeddings with the principal components of the target's, as many as fit."""
    source_VH = target_VH.float()
    centred_VH = source_VH - source_VH.mean(0)
    width = min(own_VW.shape[1], source_VH.shape[1])
    _, directions_HH = torch.linalg.eigh(centred_VH.T @ centred_VH)
    projected_VW = centred_VH @ directions_HH.flip(1)[:, :width]
    own_VW.zero_()
    own_VW[: len(projected_VW), :width] = projected_VW / projected_VW.std() * own_VW.shape[1] ** -0.5


def follows(asked_BL: Tensor) -> Tensor:
    """Return, for each position that is set, in order, whether the one before it is also set."""
    place_R = asked_BL.flatten().nonzero()[:, 0]
    return functional.pad(place_R[1:] - place_R[:-1] == 1, (1, 0)) if len(place_R) else place_R.bool()
