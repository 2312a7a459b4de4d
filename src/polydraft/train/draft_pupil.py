"""Distilling a small language model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.models.head_folder import save_vocabulary
from polydraft.models.loading import Loaded
from polydraft.sampling import PartialVocabulary
from polydraft.train.conversations import Texts
from polydraft.train.laws import TargetLaws, Teacher
from polydraft.train.pupil import Pupil
from polydraft.train.settings import DraftSize, TrainSettings


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

    depths = 1

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
        import copy

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
