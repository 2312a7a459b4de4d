"""Drafts in training: a small language model, distilled, and a feature head, trained on its own outputs."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polydraft.errors import UsageError
from polydraft.models import FeatureHead, HeadShape
from polydraft.models.head_folder import new_head, save_head, save_vocabulary, tokenizer_fingerprint
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded
from polydraft.sampling import PartialVocabulary
from polydraft.schemes import RejectionWithoutReplacement
from polydraft.train.corpus import Texts
from polydraft.train.settings import DraftSize, HeadSize, TrainSettings
from polydraft.trees import causal_block

_CHUNK_BYTES = 2**29
"""Logits over all tokens are large; so many bytes of them at a time."""
_CHUNK_ROWS, _CANDIDATES = 256, 4
"""Positions whose acceptance is measured at a time, and the candidates drawn at each."""


@dataclass(frozen=True, eq=False)
class TargetLaws:
    """Short laws of some positions, with the mass that a draft cannot reach."""

    probs_RD: Tensor
    """The target's probabilities of the tokens that the draft knows; they need not sum to one."""
    best_R: Tensor
    """Column of the likeliest token, or -1 where the draft does not know it."""

    def rows(self, index: Tensor | slice) -> "TargetLaws":
        """Return the laws of some of the positions."""
        return TargetLaws(self.probs_RD[index], self.best_R[index])


class Teacher:
    """Read texts with the target and tell its features and laws.

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
        context = self.target.start(*tokens_BL.shape)
        return context.extend(tokens_BL, causal_block(*tokens_BL.shape, self.target.device))

    @torch.no_grad()
    def laws(self, features_RF: Tensor) -> TargetLaws:
        """Return the laws that follow some positions, given by their features."""
        rows = max(_CHUNK_BYTES // (4 * self.target.vocab_size), 1)
        parts = [self._laws(part_RF) for part_RF in features_RF.split(rows)]  # type: ignore[no-untyped-call]
        return TargetLaws(torch.cat([part.probs_RD for part in parts]), torch.cat([part.best_R for part in parts]))

    def _laws(self, features_RF: Tensor) -> TargetLaws:
        logits_RV = self.target.head(features_RF).float()
        best_R = logits_RV.argmax(-1)
        normaliser_R1 = logits_RV.logsumexp(-1, keepdim=True)
        if self.vocabulary is None or self._column_V is None:
            return TargetLaws((logits_RV - normaliser_R1).exp(), best_R)
        short_RD = logits_RV[:, self.vocabulary.tokens_D]
        return TargetLaws((short_RD - normaliser_R1).exp(), self._column_V[best_R])


def loss_of(kind: str, laws: TargetLaws, logits_RD: Tensor) -> Tensor:
    """Return the mean loss over positions.

    ``kl`` is −Σ p log q, the Kullback–Leibler divergence up to a constant. ``tv`` is 1 − Σ min(p, q), the chance that
    speculative sampling rejects; its gradient vanishes where laws do not overlap, so it serves to finish, or as a sum.
    """
    log_probs_RD = logits_RD.float().log_softmax(-1)
    loss = log_probs_RD.new_zeros(())
    if "kl" in kind:
        loss = loss - (laws.probs_RD * log_probs_RD).sum(-1).mean()
    if "tv" in kind:
        loss = loss + 1 - log_probs_RD.exp().minimum(laws.probs_RD).sum(-1).mean()
    return loss


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


def acceptance_of(laws: TargetLaws, logits_RD: Tensor, seed: int = 0) -> Acceptance:
    """Measure a draft's logits against the target's laws at the same positions.

    The rate with four candidates is exact given the candidates: the mass that verification puts on them.
    """
    generator = torch.Generator(logits_RD.device).manual_seed(seed)
    top_R4 = logits_RD.topk(min(_CANDIDATES, logits_RD.shape[1]), dim=-1).indices
    hits_R4 = top_R4 == laws.best_R[:, None]
    sampled_1, sampled_4 = [], []
    scheme = RejectionWithoutReplacement()
    for first in range(0, len(logits_RD), _CHUNK_ROWS):
        probs_RD, draft_RD = (
            laws.probs_RD[first : first + _CHUNK_ROWS],
            logits_RD[first : first + _CHUNK_ROWS].float().softmax(-1),
        )
        sampled_1.append(torch.minimum(probs_RD, draft_RD).sum(-1))
        # One more column for all tokens that the draft does not know.
        rest_R1 = (1 - probs_RD.double().sum(-1, keepdim=True)).clamp(min=0)
        target_RX = torch.cat([probs_RD.double(), rest_R1], dim=-1)
        draft_RX = torch.nn.functional.pad(draft_RD, (0, 1))
        uniforms_RK = torch.rand(len(draft_RX), _CANDIDATES, generator=generator, device=generator.device, dtype=torch.float64)
        children_RK = scheme.draw(draft_RX, uniforms_RK)
        law_RX = scheme.law(target_RX, draft_RX, children_RK)
        sampled_4.append((law_RX.gather(1, children_RK.clamp(min=0)) * (children_RK >= 0)).sum(-1))
    return Acceptance(
        greedy_1=hits_R4[:, 0].double().mean().item(),
        greedy_4=hits_R4.any(-1).double().mean().item(),
        sampled_1=torch.cat(sampled_1).mean().item(),
        sampled_4=torch.cat(sampled_4).mean().item(),
    )


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
    def lesson(self, texts: Texts, depths: int) -> tuple[TargetLaws, list[tuple[Tensor, Tensor]]]:
        """Return the target's laws at the answers' positions, and for each depth rows of these and the draft's logits there."""

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

    def lesson(self, texts: Texts, depths: int) -> tuple[TargetLaws, list[tuple[Tensor, Tensor]]]:
        """Run the draft along the texts."""
        device = self.teacher.target.device
        tokens_BL, answer_BL = texts.tokens_NL.to(device).long(), texts.answer_NL.to(device)
        asked_BL = answer_BL[:, 1:]
        laws = self.teacher.laws(self.teacher.features(tokens_BL)[:, :-1][asked_BL])
        hidden_BLH = self.model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state
        table_VH = self.model.get_output_embeddings().weight
        table_DH = table_VH if self._vocabulary is None else table_VH[self._vocabulary.tokens_D]
        logits_RD = torch.nn.functional.linear(hidden_BLH[:, :-1][asked_BL], table_DH)
        return laws, [(torch.arange(len(logits_RD), device=device), logits_RD)]

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
        shape = _shape(settings.size, settings.length, target)
        target.model.tap(shape.taps)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            self.head = new_head(shape, target.model, vocabulary, "feature head")
        self.head.float().to(target.model.device)
        self.module: FeatureHead = self.head
        self.teacher = Teacher(target.model, vocabulary)

    @torch.no_grad()
    def prime(self, texts: Texts) -> None:
        """Let outputs begin at the scale of the target's hidden states, channel by channel, as its output head expects."""
        tokens_BL = texts.tokens_NL[:4].to(self.head.device).long()
        hidden_BLH = self.teacher.features(tokens_BL)[:, 1:, : self.head.shape.hidden_size].float()
        self.head.output_norm.weight.copy_(hidden_BLH.square().mean((0, 1)).sqrt())

    def lesson(self, texts: Texts, depths: int) -> tuple[TargetLaws, list[tuple[Tensor, Tensor]]]:
        """Run the head along the texts; entry i (features i, token i + 1) answers for the law after token i + 1.

        At depth d an entry takes the output of depth d − 1 one entry earlier for its features, and attends, as inside a tree,
        to entries of depth 0 up to d places back and to one of each depth between.
        """
        device = self.head.device
        tokens_BL, answer_BL = texts.tokens_NL.to(device).long(), texts.answer_NL.to(device)
        features_BLF = self.teacher.features(tokens_BL)
        entries = tokens_BL.shape[1] - 2
        asked_BE = answer_BL[:, 2:]
        laws = self.teacher.laws(features_BLF[:, 1:-1][asked_BE])
        rows_BE = torch.full(asked_BE.shape, -1, device=device).masked_scatter(
            asked_BE, torch.arange(int(asked_BE.sum()), device=device)
        )
        following_BE = tokens_BL[:, 1:-1]
        positions_BE = torch.arange(entries, device=device).expand(len(tokens_BL), -1)
        fused_BEH = self.head.fused(features_BLF[:, :entries].to(self.head.dtype))
        keys, values, answers = [], [], []
        for depth in range(depths):
            passing_BEH, normed_BEX = self.head.entry(fused_BEH, following_BE)
            query, key, value = self.head.projected(normed_BEX, positions_BE)
            keys.append(key)
            values.append(value)
            mask_ES = _depth_mask(entries, depth, self.head.shape.window, device)
            outputs_BEH = self.head.attended(passing_BEH, query, torch.cat(keys, 2), torch.cat(values, 2), mask_ES[None, None])
            asked_here_BE = asked_BE.clone()
            asked_here_BE[:, :depth] = False  # there is no text so far back
            answers.append((rows_BE[asked_here_BE], self.head.head(outputs_BEH[asked_here_BE])))
            fused_BEH = torch.nn.functional.pad(outputs_BEH[:, :-1], (0, 0, 1, 0))
        return laws, answers

    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write the head."""
        save_head(self.head, folder, tokenizer_fingerprint(self._tokenizer), details)


def _depth_mask(entries: int, depth: int, window: int, device: torch.device) -> Tensor:
    """Return which keys, entries of depth 0 first, an entry of some depth attends to."""
    query_E1, key_1E = torch.arange(entries, device=device)[:, None], torch.arange(entries, device=device)[None]
    parts = [(key_1E <= query_E1 - depth) & (query_E1 - key_1E < window)]
    parts += [key_1E == query_E1 - depth + between for between in range(1, depth + 1)]
    mask_ES = torch.cat(parts, dim=1)
    # Entries before the text began see themselves: their outputs are not used, but must be numbers.
    mask_ES[:, -entries:] |= (query_E1 == key_1E) & (query_E1 < depth)
    return mask_ES


def _shape(wanted: HeadSize, window: int, target: Loaded) -> HeadShape:
    config, layers = target.model.config, target.model.num_layers
    taps = wanted.taps
    if taps is None:
        taps = tuple(sorted({layers // 4, layers // 2, 3 * layers // 4} - {0, layers}))
    if not all(1 <= tap <= layers for tap in taps):
        raise UsageError(f"--taps {','.join(map(str, taps))} is out of range; allowed: layers 1 to {layers} of this target")
    heads = int(config.num_attention_heads)
    size = target.model.hidden_size
    return HeadShape(
        hidden_size=size,
        taps=taps,
        num_heads=heads,
        num_key_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or size // heads),
        mlp_size=wanted.mlp_size or int(getattr(config, "intermediate_size", None) or 4 * size),
        window=window,
    )
