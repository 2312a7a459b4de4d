"""Cases of what models do: placing tokens, attention, products, whole passes."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from families import FAMILIES
from models.attention_cases import Case as Attention
from models.fused_cases import FORMS, head_of, numbers
from polydraft.models.bodies import FastBody
from polydraft.models.cache import SlotCache
from polydraft.models.heads.feature_head import FeatureHead
from polydraft.models.heads.head_context import FastHead
from polydraft.models.hf import HFModel
from polydraft.models.quantised import rounded
from polydraft.operations import using
from polydraft.sampling import NO_TOKEN
from polydraft.trees import Block, SlicedMask, causal_block, parse_tree

from .harness import Case, cases, equal


def close(found: Any, expected: Any, tolerance: float) -> None:
    """Compare numbers whatever their format is."""
    equal(found.float(), expected.float(), tolerance)


@cases("place")
def _() -> Iterator[Case]:
    def arguments(limits: tuple[int | None, int | None, int | None], scattered: bool, device: str) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(NO_TOKEN, 60, (3, 10), generator=generator).to(device)[:, 5:]
        places = torch.stack([torch.randperm(7, generator=generator)[:5] for _ in range(3)]).to(device)
        visible = torch.ones(3, 5, 7, dtype=torch.bool, device=device)
        block = Block(2, torch.tensor([0, 1, 1, 2, 3], device=device).expand(3, -1), visible, places if scattered else None)
        return tokens, block, torch.tensor([0, 17, 5], device=device), torch.full((3, 40), -5, device=device), *limits

    for number, limits in enumerate([(None, None, None), (12, 40, 4), (None, None, 3)]):
        yield Case(f"limits {limits}", partial(arguments, limits, False), slow=number > 1)
    yield Case("places by values", partial(arguments, (None, None, None), True))


@cases("move_up")
def _() -> Iterator[Case]:
    def arguments(rows: int, places: int, device: str) -> tuple[Any, ...]:
        cache = SlotCache(2, 80)
        stored = torch.arange(2.0 * rows * 3 * 80 * 6).view(2, rows, 3, 80, 6).to(device)
        cache.keys_LBHSC, cache.values_LBHSC = stored, -stored
        lengths = torch.tensor([4, 0, 7], device=device)[:rows]
        path = torch.arange(places, device=device).expand(rows, -1).clone()
        path[0, 1] = places - 1
        positions = torch.full((rows, 80), -1, device=device)
        return cache, lengths, path, positions

    yield Case("one row", partial(arguments, 1, 4))
    yield Case("some rows", partial(arguments, 3, 4))
    yield Case("many places", partial(arguments, 1, 65), slow=True)


@cases("take_roots")
def _() -> Iterator[Case]:
    def arguments(device: str) -> tuple[Tensor, ...]:
        outputs = numbers(3, 4, 32, device=device, dtype=torch.float32, seed=0)
        return outputs, torch.tensor([1, 4, 0], device=device), torch.tensor([5, 2, 9], device=device)

    yield Case("rows of each kind", arguments)


@cases("keep_entries")
def _() -> Iterator[Case]:
    def arguments(device: str) -> tuple[Any, ...]:
        tokens = torch.tensor([[7, 8, 9, NO_TOKEN], [1, 2, 3, 4], [5, 6, 7, 8]], device=device)
        path = torch.tensor([[0, 2, 5, 5], [0, 0, 0, 0], [0, 1, 3, 4]], device=device)
        keep, lengths = torch.tensor([3, 0, 4], device=device), torch.tensor([5, 2, 9], device=device)
        kept = torch.zeros_like(tokens), torch.zeros(3, 4, 48, device=device), torch.ones(3, dtype=torch.long, device=device)
        return tokens, path, keep, numbers(3, 6, 48, device=device, dtype=torch.float32, seed=1), lengths, kept

    yield Case("rows of each kind", arguments)


@cases("tree_attention")
def _() -> Iterator[Case]:
    def arguments(case: Attention, windowed: bool, device: str) -> tuple[Any, ...]:
        query, key, value, lengths, visible = case.build(device)
        starts = (lengths[:, None] - 3).clamp(min=0).expand(-1, case.size).contiguous() if windowed else None
        # Masked attention reads every slot.
        return query, key.nan_to_num(0.5), value.nan_to_num(0.5), lengths, visible, 0.3, max(case.lengths), starts

    small = Attention(lengths=(20, 3), size=4, earlier=2, group=3, key_heads=1, channels=16)
    yield Case("ragged", partial(arguments, small, False), tolerance=1e-5)
    yield Case("a window", partial(arguments, small, True), tolerance=1e-5)
    yield Case("wide", partial(arguments, Attention(lengths=(129,), size=1, group=4, channels=96), False), True, 1e-5)


@cases("multiply_int8")
def _() -> Iterator[Case]:
    def arguments(rows: int, bias: bool, device: str) -> tuple[Any, ...]:
        weight = numbers(37, 83, device=device, dtype=torch.float32, seed=1)
        return (
            numbers(rows, 83, device=device, dtype=torch.float32, seed=0),
            *rounded(weight),
            numbers(37, device=device, dtype=torch.float32, seed=2) if bias else None,
        )

    for rows in (1, 9):
        yield Case(f"{rows} rows", partial(arguments, rows, rows > 1), tolerance=1e-2)

    def even(device: str) -> tuple[Any, ...]:
        weight = numbers(100, 128, device=device, dtype=torch.float32, seed=4)
        return numbers(3, 128, device=device, dtype=torch.float32, seed=5), *rounded(weight), None

    yield Case("rows of whole blocks", even, tolerance=1e-2)


def multiplies(weight: Tensor, found: Any, expected: None, tolerance: float) -> None:
    """Compare products with those of torch."""
    inputs = numbers(5, weight.shape[1], device="cpu", dtype=weight.dtype, seed=3)
    close(found(inputs), torch.nn.functional.linear(inputs.float(), weight.float()), tolerance)


@cases("fast_product")
def _() -> Iterator[Case]:
    for dtype, int8, tolerance in ((torch.float32, False, 1e-4), (torch.bfloat16, False, 0.1), (torch.float32, True, 0.3)):
        weight = numbers(37, 83, device="cpu", dtype=dtype, seed=1)
        name = f"{dtype}{', int8' if int8 else ''}"
        yield Case(name, lambda _, given=((weight, None), int8): given, False, tolerance, partial(multiplies, weight))


@cases("fast_linears")
def _() -> Iterator[Case]:
    layer = torch.nn.Linear(512, 512).requires_grad_(False)

    def compare(found: Any, expected: None, tolerance: float) -> None:
        inputs = numbers(5, 512, device="cpu", dtype=torch.float32, seed=3)
        with torch.no_grad():
            expected_RF = layer(inputs)
            with found:
                close(layer(inputs), expected_RF, tolerance)

    yield Case("a layer", lambda _: (layer,), False, 1e-4, compare)


@torch.no_grad()
def passes(made: Callable[[], HFModel], found: FastBody, expected: None, tolerance: float) -> None:
    """Compare a text and a tree behind it with torch's passes."""
    model = made()
    block = SlicedMask.of(parse_tree("2x1"), torch.device("cpu")).level(0, 5).expand(2)
    features = []
    for fast in (found, None):
        model.fast = fast
        context = model.start(2, 32)
        context.prefill([[5, 6, 7, 8, 9], [3, 4]])
        features.append(context.extend(torch.tensor([[11, 12, 13, 14, 15]] * 2), block))
    close(*features, tolerance)


@cases("fast_body")
def _() -> Iterator[Case]:
    @cache
    def model_of(family: str) -> HFModel:
        with using():
            return HFModel(FAMILIES.get(family).build(num_hidden_layers=2))

    def case(family: str, invariant: bool) -> Case:
        made, name = partial(model_of, family), f"{family}{', invariant' if invariant else ''}"
        slow = (family, invariant) not in (("llama", False), ("qwen2", True))
        return Case(name, lambda _: (made(), invariant), slow, 1e-4, partial(passes, made))

    for family in ("llama", "qwen2", "mistral-sliding"):
        yield from (case(family, invariant) for invariant in (False, True))


@torch.no_grad()
def reads(head: FeatureHead, found: FastHead, expected: None, tolerance: float) -> None:
    """Compare entries of a text, and levels behind it, with torch's."""
    mask, rows = SlicedMask.of(parse_tree("2x1"), torch.device("cpu")), 2
    before, above = (numbers(rows, size, 32, device="cpu", dtype=torch.float32, seed=size) for size in (3, 1))
    outputs = []
    for fast in (found, None):
        context = head.start(rows, 16)
        context.fast = fast
        passed = [context.read(torch.tensor([[1, 2, 3]] * rows), before, causal_block(rows, 3, torch.device("cpu")))]
        context.rewind([3, 2])
        level = torch.tensor([[4], [5]]), above, mask.level(0, 1).expand(rows)
        passed.append(context.read(*level))
        parents = torch.tensor([0, 0])
        passed.append(context.read(torch.tensor([[6, 7]] * rows), passed[-1], mask.level(1, 3).expand(rows), parents))
        outputs.append(torch.cat(passed, dim=1))
    close(*outputs, tolerance)


@cases("fast_head")
def _() -> Iterator[Case]:
    for name, form in FORMS.items():
        head = head_of("cpu", torch.float32, form)
        head.native = True
        yield Case(name, lambda _, head=head: (head,), name != "ours", 1e-4, partial(reads, head))


@cases("kernel_obstacle")
def _() -> Iterator[Case]:
    def compare(found: str | None, expected: str | None, tolerance: float) -> None:
        assert found is None and "run on GPUs" in str(expected)

    yield Case("in the interpreter", lambda device: (torch.device(device), torch.float32), compare=compare)
