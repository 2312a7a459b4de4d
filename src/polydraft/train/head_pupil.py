"""A feature head in training: its shape, its initial weights, and its passes over texts at all depths of drafting."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.errors import UsageError
from polydraft.models import FeatureHead, HeadShape
from polydraft.models.families import key_shape
from polydraft.models.heads.feature_head import TapNorm
from polydraft.models.heads.head_export import export_speculators
from polydraft.models.heads.head_folder import new_head, save_head, tokenizer_fingerprint
from polydraft.models.loading import Loaded
from polydraft.sampling import PartialVocabulary
from polydraft.train.pupils import Lesson, Pupil, Teacher, follows
from polydraft.train.settings import HeadSize, TrainSettings
from polydraft.train.writer import Texts


class HeadPupil(Pupil):
    """A feature head in training, which also learns on its own outputs (EAGLE-3 §3.2: training-time test).

    If `start` is an EAGLE-3 head, training continues with its form, tables and vocabulary. If it is one of ours, a new head of
    the wanted form takes over the weights that fit.
    """

    def __init__(
        self, settings: TrainSettings, target: Loaded, vocabulary: PartialVocabulary | None, start: FeatureHead | None
    ) -> None:
        assert isinstance(settings.size, HeadSize)
        self.depths, self._tokenizer, self._target_name = settings.size.rollouts, target.tokenizer, settings.target
        self._start = start if start is None or start.shape.joins else None
        if start is not None and self._start is None:
            self.head, vocabulary = start.requires_grad_(True), start.vocabulary
            self.head.int8 = False
        else:
            shape = shape_for(settings.size, settings.longest, target)
            with torch.random.fork_rng():
                torch.manual_seed(settings.seed)
                self.head = new_head(shape, target.model, vocabulary, "feature head")
        target.model.tap(self.head.shape.taps)
        self.head.float().to(target.model.device)
        self.module: FeatureHead = self.head
        self.teacher = Teacher(target.model, vocabulary)

    @torch.no_grad()
    def prime(self, texts: Texts) -> None:
        """Scale outputs, channel by channel, like the target's hidden states, which its output head expects."""
        if not self.head.shape.joins:  # an EAGLE-3 head has already learned its scales
            return
        tokens_BL = texts.tokens_NL[:4].to(self.head.device).long()
        hidden_BLH = self.teacher.features(tokens_BL)[:, 1:, : self.head.shape.hidden_size].float()
        self.head.output_norm.weight.copy_(hidden_BLH.square().mean((0, 1)).sqrt())
        if self._start is not None:
            features_BLF = self.teacher.features(tokens_BL)[:, 1:].float()
            take_over(self.head, self._start, features_BLF)

    def study(self, texts: Texts, depths: int) -> Lesson:
        """Run the head along the texts; entry i (features i, token i + 1) predicts the distribution after token i + 1.

        At depth d, the features of an entry are the output of depth d − 1 one entry earlier. As inside a tree, it attends to
        entries of depth 0 at least d places back and to one entry of each depth in between.
        """
        device = self.head.device
        tokens_BL, answer_BL = texts.tokens_NL.to(device).long(), texts.answer_NL.to(device)
        features_BLF = self.teacher.features(tokens_BL)
        # The last two entries predict nothing. They are kept because products of round sizes are faster.
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
            asked_here_BL[:, :depth] = False  # these would start before the text
            outputs.append((rows_BL[asked_here_BL], outputs_BLH[asked_here_BL]))
            fused_BLH = functional.pad(outputs_BLH[:, :-1], (0, 0, 1, 0))
        return Lesson(distributions, follows(asked_BL), outputs)

    def logits(self, outputs_RH: Tensor) -> Tensor:
        """Apply the output head."""
        return self.head.head(outputs_RH)

    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write the head in our format or, if it is an EAGLE-3 head, in that of speculators."""
        if self.head.shape.joins:
            return save_head(self.head, folder, tokenizer_fingerprint(self._tokenizer), details)
        export_speculators(copy.deepcopy(self.head).bfloat16(), self.teacher.target, self._target_name, folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **details}, indent=1) + "\n")


def _attended(query_BHLC: Tensor, keys: list[Tensor], values: list[Tensor], window: int) -> Tensor:
    """Return the output of attention at one depth, given the keys and values `[B, K, L, C]` of this and all earlier depths.

    An entry at depth d sees all entries of depth 0 at least d places back, which are matrix products, and one entry of each
    depth in between, which are diagonals.
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
        # Entries that would start before the text see at least themselves: their outputs are unused, but must not be NaN.
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
    """Shift states so that every entry gets the state `places` entries before it."""
    return functional.pad(states_BKLC[:, :, : states_BKLC.shape[2] - places], (0, 0, places, 0))


def shape_for(wanted: HeadSize, window: int, target: Loaded) -> HeadShape:
    """Return the shape of a head: that of one of the target's layers, unless the settings say otherwise."""
    config, layers = target.model.config, target.model.num_layers
    taps = wanted.taps
    if taps is None:
        inner = {2, layers // 4, layers // 2, 3 * layers // 4, layers - 3}
        taps = tuple(sorted(layer for layer in inner if 1 <= layer < layers))
    if not all(1 <= tap <= layers for tap in taps):
        raise UsageError(f"--taps {','.join(map(str, taps))} is out of range; allowed: layers 1 to {layers} of this target")
    key_heads, head_size = key_shape(config)
    size = target.model.hidden_size
    return HeadShape(
        hidden_size=size,
        taps=taps,
        num_heads=int(config.num_attention_heads),
        num_key_heads=key_heads,
        head_size=head_size,
        mlp_size=wanted.mlp_size or int(getattr(config, "intermediate_size", None) or 4 * size),
        window=window,
        tap_norm=TapNorm.EACH if taps else TapNorm.NONE,
    )


@torch.no_grad()
def take_over(head: FeatureHead, start: FeatureHead, features_BLF: Tensor) -> None:
    """Copy the weights of another head for the same target; taps and MLP units that it lacks have no effect at first.

    Features that it read without a norm get one whose weights keep their typical length.
    """
    shape, own, size = start.shape, head.state_dict(), start.shape.hidden_size
    weights = {name: weight.cpu() for name, weight in start.state_dict().items()}
    inputs, known = [0, *head.shape.taps], [0, *shape.taps]  # the last hidden states come first
    parts = weights.pop("fuse.weight", torch.eye(size)).float().chunk(len(known), dim=1)
    wide = [parts[known.index(tap)] if tap in known else torch.zeros(size, size) for tap in inputs]
    if head.fuse is not None:
        weights["fuse.weight"] = torch.cat(wide, dim=1)
    norms = dict(zip(known, [weights.pop(f"tap_norms.{place}.weight", None) for place in range(len(known))], strict=True))
    lengths = [part_BLH.square().mean(-1).sqrt().median() for part_BLH in features_BLF.chunk(len(inputs), dim=-1)]
    for place, (tap, length) in enumerate(zip(inputs, lengths, strict=True)):
        if head.tap_norms and tap in known:
            norm = norms[tap]
            weights[f"tap_norms.{place}.weight"] = torch.full((size,), float(length)) if norm is None else norm
    if shape.mlp_size < head.shape.mlp_size:
        _widen(weights, own)
    if odd := [name for name, weight in weights.items() if name not in own or own[name].shape != weight.shape]:
        raise UsageError(
            f"--start {start.name} has another shape ({odd[0]} differs); use its --mlp or a larger one, and taps if it has any"
        )
    head.load_state_dict({**own, **weights})


def _widen(weights: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Add MLP units with random input weights and zero output weights."""
    gates = zip(weights["gate_up.weight"].chunk(2), own["gate_up.weight"].cpu().chunk(2), strict=True)
    wide = [torch.cat([known_MH, fresh_MH[len(known_MH) :].to(known_MH.dtype)]) for known_MH, fresh_MH in gates]
    weights["gate_up.weight"] = torch.cat(wide)
    missing = own["down.weight"].shape[1] - weights["down.weight"].shape[1]
    weights["down.weight"] = functional.pad(weights["down.weight"], (0, missing))
