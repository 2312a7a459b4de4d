"""Training a feature head on its own outputs (EAGLE-3 §3.2: training-time test)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.models import FeatureHead, HeadShape
from polydraft.models.head_folder import new_head, save_head, tokenizer_fingerprint
from polydraft.models.loading import Loaded
from polydraft.sampling import PartialVocabulary
from polydraft.train.conversations import Texts
from polydraft.train.laws import TargetLaws, Teacher
from polydraft.train.pupil import Pupil
from polydraft.train.settings import HeadSize, TrainSettings


class HeadPupil(Pupil):
    """A feature head in training."""

    def __init__(self, settings: TrainSettings, target: Loaded, vocabulary: PartialVocabulary | None) -> None:
        assert isinstance(settings.size, HeadSize)
        self.settings, self._tokenizer = settings, target.tokenizer
        shape = _shape(settings, target)
        target.model.tap(shape.taps)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            self.head = new_head(shape, target.model, vocabulary, "feature head")
        self.head.float().to(target.model.device)
        self.module: FeatureHead = self.head
        self.teacher = Teacher(target.model, vocabulary)

    @property
    def depths(self) -> int:
        """Depths to train at."""
        assert isinstance(self.settings.size, HeadSize)
        return self.settings.size.rollouts

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
            joined_BEH = self.head.entry(fused_BEH, following_BE)
            query, key, value = self.head.projected(joined_BEH, positions_BE)
            keys.append(key)
            values.append(value)
            mask_ES = _depth_mask(entries, depth, self.head.shape.window, device)
            outputs_BEH = self.head.attended(joined_BEH, query, torch.cat(keys, 2), torch.cat(values, 2), mask_ES[None, None])
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


def _shape(settings: TrainSettings, target: Loaded) -> HeadShape:
    assert isinstance(settings.size, HeadSize)
    config, layers = target.model.config, target.model.num_layers
    taps = settings.size.taps
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
        mlp_size=settings.size.mlp_size or int(getattr(config, "intermediate_size", None) or 4 * size),
        window=settings.length,
    )
