"""Checks whether an unknown model gives the same logits in trees, in ragged batches and past its windows as in a plain pass.

They run mostly on twins (`polydraft.models.twin`), because the model itself would take too long.

See docs/decisions/020-unknown-models-are-tried-on-a-twin.md.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polydraft.errors import PolydraftError, UsageError, first_line
from polydraft.models.twin import POSITIONS, WINDOW, WINDOWS, twins
from polydraft.trees import Block, parse_tree

if TYPE_CHECKING:
    from polydraft.models.hf import HFModel

_TREE = "[[0],[1],[2],[0,0],[1,0],[1,1]]"
_PAST_WINDOWS = 2 * WINDOW + 5
_EXACT = 1e-3
"""Largest difference of logits, relative to the largest logit, that counts as rounding in float32."""
_SAME_FORMULA = 1e-4
"""The same for two ways to compute a recurrent layer. Sound classes differ by 3e-6; Nemotron-H, which clamps time steps in a
scan but not for single tokens, by 1e-3 now and then."""


def check_habits(model: "HFModel") -> bool:
    """Refuse a model whose logits in trees are not those of plain passes; return whether its texts may outgrow its context."""
    # Quantised models are coarse, too: they round inputs to steps, and a rounding error before that can cost a whole step. In
    # Gemma 3 in int8, which has inputs 800 times as large as most, plain passes over a text and over a part of it differ by
    # 2e-3.
    coarse = model.int8 or model.quantised_by is not None or model.dtype not in (torch.float32, torch.float64)
    for wrapped in working_twins(model.hf_model):
        may_outgrow = _check_twin(wrapped)
        model.resumes = wrapped.resumes
        # The class is fine. What is left is to notice changed layers in this model; the tolerance is wide because of experts,
        # whose routing may flip.
        _check(model, [7, 4], 0.2 if coarse else _EXACT)
        return may_outgrow
    tolerance = 5e-2 if coarse else _EXACT
    _check(model, [7, 4], tolerance)
    values = [value for key, value in model.config.to_dict().items() if re.fullmatch(WINDOWS, key)]
    window = max((value for value in values if isinstance(value, int)), default=0)
    if window:  # one text and few branches, because this is the model itself and its window may be wide
        _check(model, [min(window + 4, (model.max_positions or window + 6) - 2)], tolerance, tree="[[0],[1],[1,0]]")
    return False


def working_twins(model: Any) -> Iterator["HFModel"]:
    """Yield the twins of a `transformers` model that run at all; the model itself may be without weights."""
    from polydraft.models.hf import HFModel  # late: it imports this module

    for twin in twins(model):
        try:
            wrapped = HFModel(twin, trusted=True)
            with torch.no_grad():
                _try(wrapped)
        except Exception:  # its sizes do not fit each other, which says nothing about the model
            continue
        yield wrapped


def _check_twin(model: "HFModel") -> bool:
    """Check texts past all windows and up to the end of the context; see `check_habits`."""
    limit = model.max_positions or POSITIONS
    # First come the checks of what would make every tree wrong, so that a refusal names the cause.
    texts = _texts(model, [_PAST_WINDOWS])
    _check_causal(model, texts, _plain(model, texts), _EXACT)
    _check_cached(model, texts[0])
    model.resumes = model.recurrence is not None and _resumes(model, texts[0])
    _check(model, [min(_PAST_WINDOWS, limit - 3), WINDOW + 1, 3], _EXACT)
    _check(model, [limit - 2, 3], _EXACT)
    if model.max_positions is None or not model.steady_positions:
        return model.max_positions is None
    model.max_positions = None
    try:
        _check(model, [limit + 3, 3], _EXACT)
    except PolydraftError:
        return False
    return True


def _check(model: "HFModel", lengths: Sequence[int], tolerance: float, tree: str = _TREE) -> None:
    """Compare a tree pass below texts of these lengths with plain passes along each branch."""
    topology = parse_tree(tree)
    tables = topology.tables(model.device)
    texts = _texts(model, lengths)
    filler = _texts(model, [topology.num_nodes] * len(texts), seed=1)
    trees = [[text[-1], *more[1:]] for text, more in zip(texts, filler, strict=True)]
    ancestors = tables.ancestors_NN.tolist()
    leaves = [node for node in range(topology.num_nodes) if node not in topology.parents]
    branches = [[node for node in range(leaf + 1) if ancestors[leaf][node]] for leaf in leaves]
    paths = [
        text[:-1] + [tree[node] for node in branch] for text, tree in zip(texts, trees, strict=True) for branch in branches
    ]
    expected_BTV = _plain(model, paths)
    _check_causal(model, paths, expected_BTV, tolerance)
    if model.recurrence is not None:
        for row, text in enumerate(texts):
            own = slice(row * len(branches), (row + 1) * len(branches))
            stop = max(map(len, paths[own]))
            expected_BTV[own, len(text) - 1 : stop] = _cached(model, paths[own], len(text) - 1)[:, 1:]
    size = len(tables.depths_N)
    block = Block(0, tables.depths_N.expand(len(texts), size), tables.ancestors_NN.expand(len(texts), size, size))
    try:
        context = model.start(len(texts), max(lengths) + size)
        # In two parts, because only the second one continues from what the cache holds.
        context.prefill([text[: len(text) // 2] for text in texts])
        context.prefill([text[len(text) // 2 : -1] for text in texts])
        got_BNV = model.head(context.extend(torch.tensor(trees, device=model.device), block)).cpu()
    except PolydraftError:
        raise
    except Exception as error:
        raise UsageError(
            f"{_name(model)} cannot score trees ({first_line(error, kind=True)}); docs/models.md lists what works"
        ) from error
    what = "tree masks" if model.recurrence is None else "the states of its recurrent layers"
    for number, path in enumerate(paths):
        row, branch = divmod(number, len(branches))
        places = torch.arange(len(path) - len(branches[branch]), len(path))
        if _differ(expected_BTV[number, places], got_BNV[row, branches[branch]], tolerance):
            raise UsageError(
                f"{_name(model)} does not follow {what} (logits in a tree differ from those along its path, in a "
                f"text of {lengths[row]} tokens); docs/models.md lists what works"
            )


def _name(model: "HFModel") -> str:
    scheme = "" if model.quantised_by is None else f", quantised by {model.quantised_by},"
    return f"model type {model.config.model_type!r}{scheme}"


def _check_causal(model: "HFModel", paths: list[list[int]], expected_BTV: Tensor, tolerance: float) -> None:
    """Refuse a model whose earlier logits change when the last token of a text is removed."""
    ends = torch.arange(len(paths)), torch.tensor([len(path) - 2 for path in paths])
    if _differ(expected_BTV[ends], _plain(model, [path[:-1] for path in paths])[ends], tolerance):
        raise UsageError(
            f"{_name(model)} is not causal: its plain pass lets tokens see later ones; load a causal "
            "language model, or this one with is_decoder=True if it has such a switch"
        )


def _check_cached(model: "HFModel", text: list[int]) -> None:
    """Refuse a model whose own passes differ with and without a cache: `generate` uses a cache, trees match passes without.

    Recurrent layers are tried from the first token that they read alone, by another formula than a whole text.
    """
    alone = int(model.recurrence is not None)
    start = WINDOW - 2
    expected_TV = _plain(model, [text])[0, start - 1 :]
    if not _differ(expected_TV[alone:], _cached(model, [text], start)[0, alone:], _SAME_FORMULA if alone else _EXACT):
        return
    what, remedy = "gives different logits with and without a cache (past its window, say)", "docs/models.md lists what works"
    if alone:
        what = "has recurrent layers that read a token alone by another formula than in a row"
        remedy = "if its configuration has a time_step_min, set it to 1e-12"
    kind = model.config.model_type
    raise UsageError(f"model type {kind!r} {what}, so none of its texts can be called correct; {remedy}")


def _resumes(model: "HFModel", text: list[int]) -> bool:
    """Whether recurrent layers that read several tokens at once from a given state agree with token-by-token passes."""
    context = model.start(1, len(text))
    got: list[Tensor] = []
    model.resumes = True
    # One token, fewer than the width of a convolution, and more than a chunk.
    for start, stop in itertools.pairwise([0, 1, 3, 12, len(text)]):
        context.prefill([text[start:stop]], lambda *args: got.append(model.head(args[-1][0])))
    return not _differ(_cached(model, [text], 1)[0, 1:], torch.cat(got)[1:].cpu(), _SAME_FORMULA)


def _cached(model: "HFModel", paths: Sequence[Sequence[int]], start: int) -> Tensor:
    """Return logits `[B, T, V]` after the first `start` tokens and after each later one, read with the model's own cache.

    This is how `generate` reads. Recurrent layers compute single tokens by another formula than whole texts.
    """
    argument = "past_key_values" if model.recurrence is None else model.recurrence.cache_argument
    tokens_BT = _padded(model, paths)
    places_BT = torch.arange(tokens_BT.shape[1], device=model.device).expand_as(tokens_BT)
    cache: Any = None
    rows = []
    with torch.no_grad():
        for first, last in [(0, start), *((place, place + 1) for place in range(start, tokens_BT.shape[1]))]:
            options = {argument: cache}
            if model.takes_positions:  # as `generate` does; otherwise Bamba counts from 0
                options["position_ids"] = places_BT[:, first:last]
            outputs = model.hf_model(input_ids=tokens_BT[:, first:last], use_cache=True, **options)
            cache = outputs[argument]
            rows.append(outputs.logits[:, -1].cpu())
    return torch.stack(rows, dim=1)


def _try(twin: "HFModel") -> None:
    """Run a twin's own passes, which may raise anything; refuse logits that are not finite or all equal."""
    text = _texts(twin, [_PAST_WINDOWS])[0]
    logits_BTV = _plain(twin, [text])
    assert bool(logits_BTV.isfinite().all()) and float(logits_BTV.std()) > 0
    _cached(twin, [text], WINDOW)


def _texts(model: "HFModel", lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random texts, avoiding the first few tokens of the vocabulary, which may be special."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(min(5, model.vocab_size // 2), model.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]


def _plain(model: "HFModel", texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of texts from the model's own plain pass."""
    return model.plain(_padded(model, texts)).cpu()


def _padded(model: "HFModel", texts: Sequence[Sequence[int]]) -> Tensor:
    """Return texts padded to the same length, which does not matter to a causal model."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[5] * (longest - len(text))] for text in texts], device=model.device)


def _differ(expected: Tensor, got: Tensor, tolerance: float) -> bool:
    scale = float(expected.abs().max())
    return not bool(((expected.float() - got.float()).abs() <= tolerance * scale).all())
