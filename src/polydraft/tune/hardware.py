"""Rounds on hardware that is not here, from its data sheet: bandwidth, arithmetic, and what a layer takes in any case.

A pass reads all weights and the cached keys and values, and computes with every weight for every token. On the one GPU where
this could be checked both times add up rather than hide each other (docs/tune.md): an H200 takes 3.97 ms for a token of the 7B
shape, 4.19 for 16 and 4.77 for 64; these formulas say 4.00, 4.20 and 4.85.
"""

import re
from dataclasses import dataclass

from polydraft.errors import UsageError, unknown_name
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.hf import HFModel

_OF_BANDWIDTH = 0.89
"""What passes reach of the bandwidth on the data sheet."""
_LAYER_SECONDS = 25e-6
"""Of a layer, beside reading its weights: norms, attention, waiting for each other."""
_LEVEL_SECONDS, _ROUND_SECONDS = 0.1e-3, 0.1e-3
"""Of a draft level beside its pass (drawing, masks), and of a round with drafts (walk, commit); as captured on an H200."""
_ROW_SECONDS = 0.05e-3
"""Of each text in a round with drafts; from batches of 4 to 64 on an H200, whose rounds took longer than all of the above."""
_CONTEXT = 512
_REDUCE_SECONDS = 10e-6
"""Of an all-reduce of little between GPUs of one machine."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU's data sheet, or several of them as one."""

    name: str
    gigabytes_per_second: float
    teraflops: float
    """Of dense products in bfloat16 (float16 where there is none)."""
    link: float = 450.0
    """Gigabytes per second to other GPUs of the machine, one way."""
    count: int = 1
    """GPUs that share every layer (tensor parallelism)."""


_SHEETS = {
    "b200": (8000, 2250, 900),
    "h200": (4800, 989, 450),
    "h100": (3350, 989, 450),
    "a100": (2039, 312, 300),
    "a100-40": (1555, 312, 300),
    "mi300x": (5300, 1307, 448),
    "l40s": (864, 362, 32),
    "l4": (300, 121, 32),
    "a10": (600, 125, 32),
    "t4": (320, 65, 16),
    "v100": (900, 125, 150),
    "rtx5090": (1792, 209, 32),
    "rtx4090": (1008, 165, 32),
    "rtx3090": (936, 71, 28),
}
"""Gigabytes per second, teraflops, gigabytes per second to the next GPU; by name."""


def parse_gpu(text: str) -> Gpu:
    """Read ``"h100"``, ``"h100x8"`` (eight that share every layer), or ``"BANDWIDTH:TERAFLOPS"`` in GB/s."""
    spec = text.strip().lower().removeprefix("nvidia ").replace(" ", "")
    many = re.fullmatch(r"(.*[^x])x(\d{1,3})", spec)
    spec, count = (many[1], int(many[2])) if many else (spec, 1)
    own = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", spec)
    if count < 1 or (own and (float(own[1]) <= 0 or float(own[2]) <= 0)):
        raise UsageError(f"--predict {text!r} is out of range; allowed: bandwidth, teraflops and number above 0")
    if own:
        return Gpu(name=text, gigabytes_per_second=float(own[1]), teraflops=float(own[2]), count=count)
    if spec not in _SHEETS:
        error = unknown_name("GPU", text, _SHEETS)
        raise UsageError(f"{error}, several as in h100x8, or figures such as 3350:989 (GB/s:TERAFLOPS)")
    bandwidth, teraflops, link = _SHEETS[spec]
    return Gpu(name=text, gigabytes_per_second=bandwidth, teraflops=teraflops, link=link, count=count)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a pass of a model has to do."""

    parameters: float
    """Weights that every token is multiplied with."""
    weight_bytes: float
    layers: int
    hidden_size: int
    cache_bytes: float
    """Keys and values of one token of context."""


def size_of(model: LanguageModel | FeatureHead) -> Size:
    """Return the size of a loaded model, in bfloat16."""
    if isinstance(model, FeatureHead):
        weights, shape = sum(parameter.numel() for parameter in model.parameters()), model.shape
        return _size(weights, layers=1, hidden=shape.hidden_size, keys=shape.num_key_heads * shape.head_size)
    if not isinstance(model, HFModel):
        raise UsageError(f"the size of {model.name!r} is unknown; --predict needs a model with weights")
    config = model.config
    # An embedding is looked up, not multiplied; a tied one is the output head as well.
    table = 0 if config.tie_word_embeddings else model.hf_model.get_input_embeddings().weight.numel()
    weights = sum(parameter.numel() for parameter in model.hf_model.parameters()) - table
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _size(weights, layers=config.num_hidden_layers, hidden=config.hidden_size, keys=heads * width)


LLAMAS = {
    "1b": (1536, 32, 512, 4608),
    "7b": (4096, 32, 4096, 11008),
    "13b": (5120, 40, 5120, 13824),
    "70b": (8192, 80, 1024, 28672),
}
"""Hidden size, layers, channels of keys, MLP; by name."""


def size_named(name: str, columns: int, *, layers: int | None = None) -> Size:
    """Return the size of a Llama by its name, or of one with fewer layers, such as a head of a single one."""
    if name not in LLAMAS:
        raise unknown_name("target size", name, LLAMAS)
    hidden, usual, keys, mlp = LLAMAS[name]
    count = layers or usual
    weights = count * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * mlp) + columns * hidden
    return _size(weights, layers=count, hidden=hidden, keys=keys)


def _size(weights: int, *, layers: int, hidden: int, keys: int) -> Size:
    return Size(
        parameters=weights, weight_bytes=2.0 * weights, layers=layers, hidden_size=hidden, cache_bytes=4.0 * layers * keys
    )


@dataclass(frozen=True, kw_only=True)
class PredictedRounds:
    """Rounds of a pair on a GPU, reckoned."""

    gpu: Gpu
    target: Size
    draft: Size | None
    context: int = _CONTEXT

    def pass_seconds(self, model: Size, rows: int, tokens: float, gpus: int | None = None) -> float:
        """Return the seconds of a pass over so many tokens in all, of so many texts."""
        gpu, count = self.gpu, gpus or self.gpu.count
        bytes_read = model.weight_bytes + rows * self.context * model.cache_bytes
        read = bytes_read / (count * _OF_BANDWIDTH * gpu.gigabytes_per_second * 1e9)
        computed = 2 * tokens * model.parameters / (count * gpu.teraflops * 1e12)
        return read + computed + model.layers * (_LAYER_SECONDS + self._reduced(model, tokens, count))

    def _reduced(self, model: Size, tokens: float, count: int) -> float:
        """Return the seconds of a layer's two all-reduces; each sends and receives its numbers once, in rings."""
        if count == 1:
            return 0.0
        sent = 2 * (count - 1) / count * 2 * tokens * model.hidden_size
        return 2 * (_REDUCE_SECONDS + sent / (self.gpu.link * 1e9))

    def plain(self, batch: int) -> float:
        """Return the seconds of a round without drafts."""
        return self.pass_seconds(self.target, batch, batch)

    def drafted(self, batch: int, nodes: float, levels: float) -> float:
        """Return the seconds of a round with drafts; every GPU runs the whole draft."""
        whole = self.pass_seconds(self.target, batch, batch * nodes) + _ROUND_SECONDS + batch * _ROW_SECONDS
        if self.draft is None or levels == 0:
            return whole
        width = max((nodes - 1) / levels, 1.0)
        return whole + levels * (self.pass_seconds(self.draft, batch, batch * width, gpus=1) + _LEVEL_SECONDS)
