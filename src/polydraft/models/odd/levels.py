"""Recurrent modules that read a tree level by level, each node from its parent's state.

The rest of the model reads all nodes in one pass. Under `Mixers.reading`, the mixers (`polydraft.models.odd.recurrent`) run
once per `Step`, with the tokens and states of that step only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polydraft.models.cache import SpreadCache
from polydraft.models.forwards import PassForwards
from polydraft.models.odd.recurrent import StateName, StateShape
from polydraft.trees import Block


@dataclass(frozen=True, eq=False)
class Step:
    """Tokens that mixers read together: R sequences of C tokens each."""

    rows_R: Tensor
    sources_R: Tensor
    """Index of the state that each sequence starts from: 0 for committed text, 1 + u for uncommitted place u."""
    targets_R: Tensor
    """Index that the state after its tokens is stored under."""
    columns: Tensor | slice
    """Columns of their tokens, `[R, C]`. A slice is one level in all rows, with each node a sequence."""

    def pick(self, values_BTX: Tensor) -> Tensor:
        """Return the values of these tokens, `[R, C, ...]`."""
        if isinstance(self.columns, slice):
            return values_BTX[:, self.columns].flatten(0, 1)[:, None]
        return values_BTX[self.rows_R[:, None], self.columns]

    def place(self, values_RCX: Tensor, result_BTX: Tensor) -> None:
        """Write the values of these tokens into the result for the whole pass."""
        if isinstance(self.columns, slice):
            result_BTX[:, self.columns] = values_RCX.view(len(result_BTX), -1, *values_RCX.shape[2:])
        else:
            result_BTX[self.rows_R[:, None], self.columns] = values_RCX


def level_steps(block: Block, places_BT: Tensor, depths_BU: Tensor) -> Iterator[Step]:
    """Yield a step for each level of a block, upper ones first, without a sync if the block knows its levels.

    Parameters
    ----------
    places_BT : Tensor
        Places of the block's tokens.
    depths_BU : Tensor
        Depths of the tokens in all places, the block's included.
    """
    width = block.visible_BTU.shape[2]
    above_BTU = block.visible_BTU.scatter(2, places_BT[:, :, None], False)
    depths_BTU = torch.where(above_BTU, depths_BU[:, None, :width], -1)
    deepest_BT, parents_BT = depths_BTU.max(dim=2)
    sources_BT = torch.where(deepest_BT < 0, 0, parents_BT + 1)
    if block.levels is not None:
        assert sum(block.levels) == block.size, (block.levels, block.size)
        rows_BT = torch.arange(len(sources_BT), device=sources_BT.device)[:, None].expand_as(sources_BT)
        start = 0
        for size in block.levels:
            columns = slice(start, start + size)
            rows_R, sources_R, targets_R = (one[:, columns].flatten() for one in (rows_BT, sources_BT, places_BT + 1))
            yield Step(rows_R, sources_R, targets_R, columns)
            start += size
        return
    for depth in sorted(set(block.depths_BT.flatten().tolist())):
        rows_R, columns_R = torch.nonzero(block.depths_BT == depth, as_tuple=True)
        yield Step(rows_R, sources_BT[rows_R, columns_R], places_BT[rows_R, columns_R] + 1, columns_R[:, None])


def text_steps(counts: Sequence[int], singly: Sequence[bool], device: torch.device) -> Iterator[Step]:
    """Yield the steps in which each row reads `counts` tokens of its text and keeps the last state.

    Rows with equal counts share one step. Rows that must read `singly` take one token per step.
    """
    for count in sorted({count for count, alone in zip(counts, singly, strict=True) if not alone} - {0}):
        rows = [row for row, other in enumerate(counts) if other == count and not singly[row]]
        yield _text_step(rows, range(count), device)
    longest = max((count for count, alone in zip(counts, singly, strict=True) if alone), default=0)
    for column in range(longest):
        rows = [row for row, count in enumerate(counts) if singly[row] and count > column]
        yield _text_step(rows, range(column, column + 1), device)


def _text_step(rows: list[int], columns: range, device: torch.device) -> Step:
    rows_R = torch.tensor(rows, device=device)
    columns_RC = torch.arange(columns.start, columns.stop, device=device).expand(len(rows), -1)
    return Step(rows_R, torch.zeros_like(rows_R), torch.zeros_like(rows_R), columns_RC)


class NodeStates:
    """The states of each row: that of the committed text, then those of all uncommitted places."""

    def __init__(self, shapes: Sequence[StateShape], batch_size: int, device: torch.device) -> None:
        self._states = {
            shape.name: torch.full((batch_size, 1, *shape.sizes), shape.start, dtype=shape.dtype, device=device)
            for shape in shapes
        }
        self._starts = {shape.name: shape.start for shape in shapes}
        self._rows_B1 = torch.arange(batch_size, device=device)[:, None]

    def reserve(self, places: int) -> None:
        """Make room for the states of this many places."""
        for name, states_BU in self._states.items():
            if (more := 1 + places - states_BU.shape[1]) > 0:
                fresh_BU = states_BU.new_zeros(len(states_BU), more, *states_BU.shape[2:])
                self._states[name] = torch.cat([states_BU, fresh_BU], dim=1)

    def take(self, name: StateName, step: Step) -> Tensor:
        """Return a copy of the states that a step starts from."""
        return self._states[name][step.rows_R, step.sources_R]

    def put(self, name: StateName, step: Step, states_R: Tensor) -> None:
        """Store the states that a step ends with."""
        self._states[name][step.rows_R, step.targets_R] = states_R

    def gather(self, index_BX: Tensor) -> None:
        """Replace the first states of each row by those at the given indices."""
        for states_BU in self._states.values():
            states_BU[:, : index_BX.shape[1]] = states_BU[self._rows_B1, index_BX]

    def forget(self, row: int, everywhere: bool = False) -> None:
        """Reset a row's state for a new text; if `everywhere`, those of uncommitted places too."""
        for name, states_BU in self._states.items():
            states_BU[row, : None if everywhere else 1] = self._starts[name]

    @property
    def num_rows(self) -> int:
        """Rows that have states."""
        return len(self._rows_B1)

    @property
    def address(self) -> int:
        """Where the states begin; this changes when room is made."""
        return next((states_BU.data_ptr() for states_BU in self._states.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(states_BU.nbytes for states_BU in self._states.values())


class _Layer:
    """Stands in for a cache layer in models that access its positions or, before transformers 5.22, its states."""

    is_sliding = is_compileable = record_past = False

    def __init__(self, cache: "HybridCache", number: int) -> None:
        self._cache = cache
        self.conv_states = _LayerStates(cache.get_conv_state, number)
        self.recurrent_states = _LayerStates(cache.get_recurrent_state, number)

    @property
    def indexer_position_ids(self) -> Tensor:
        """Positions of all used slots, `[3, B, S]`; the model appends those of the tokens that it reads."""
        return self._cache.positions_BS.expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Ignore the positions that the model wants to store: slots know theirs."""


class _LayerStates:
    """The states of one layer, by number."""

    def __init__(self, get: Callable[[int, int], Tensor], layer: int) -> None:
        self._get, self._layer = get, layer

    def __getitem__(self, state: int) -> Tensor:
        return self._get(self._layer, state)


class HybridCache(SpreadCache):
    """Slots for layers with attention, and the states of the current step for mixers."""

    def __init__(self, num_layers: int, capacity: int, owner: str, states: NodeStates) -> None:
        super().__init__(num_layers, capacity, owner)
        self.states = states
        self.current: dict[StateName, Tensor] = {}
        """States that the running mixer has asked for."""
        self.step: Step | None = None
        self.positions_BS = torch.empty(0, 0, dtype=torch.long)
        """Positions of the used slots."""
        self.layers = [_Layer(self, number) for number in range(num_layers)]

    def _state(self, name: StateName) -> Tensor:
        assert self.step is not None, "only mixers use states"
        if name not in self.current:
            self.current[name] = self.states.take(name, self.step)
        return self.current[name]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the last inputs of a convolution, which the model may change in place."""
        return self._state((layer_idx, "conv", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Append inputs of a convolution; return the earlier ones with them."""
        state = self._state((layer_idx, "conv", state_idx))
        whole = torch.cat([state, conv_states], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return a state, which the model may change in place."""
        return self._state((layer_idx, "recurrent", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Replace a state."""
        return self._state((layer_idx, "recurrent", state_idx)).copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state: always, because every text starts from one."""
        return True

    def is_capture_past(self, layer_idx: int) -> bool:
        """Whether states keep more of the past than they need: never."""
        return False

    def clear(self, row: int) -> None:
        """Overwrite a row's slots and states."""
        super().clear(row)
        self.states.forget(row, everywhere=True)

    def adopt(self, other: Any, rows: int) -> bool:
        """Take over the storage of another cache of the same model; return whether it fits."""
        assert isinstance(other, HybridCache)
        if other.states.num_rows != rows or not super().adopt(other, rows):
            return False
        self.states = other.states
        for row in range(rows):
            self.states.forget(row)
        return True

    @property
    def address(self) -> int:
        """A number that changes when keys and values, or states, move."""
        return hash((super().address, self.states.address))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of states."""
        return super().nbytes + self.states.nbytes


@dataclass(frozen=True, eq=False)
class _Pass:
    steps: Sequence[Step]
    cache: HybridCache
    size: tuple[int, int]
    """Rows and tokens."""


_FORWARDS: PassForwards[_Pass] = PassForwards("a recurrent layer")


class _Mixer:
    """Replaces the `forward` of one mixer."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = type(self._module).forward
        now = _FORWARDS.current
        if now is None or now.cache.step is not None:  # a mixer inside another one reads that one's tokens
            return forward(self._module, *args, **options)
        results: list[Tensor] = []
        alone = True
        for step in now.steps:
            output = self._read(now, step, args, options)
            alone = isinstance(output, Tensor)
            outputs = (output,) if alone else output
            if not results:
                results = [part_RCF.new_zeros(*now.size, *part_RCF.shape[2:]) for part_RCF in outputs]
            for result_BTF, part_RCF in zip(results, outputs, strict=True):
                step.place(part_RCF, result_BTF)
        return results[0] if alone else tuple(results)

    def _read(self, now: _Pass, step: Step, args: Any, options: dict[str, Any]) -> Any:
        def part(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape[:2] == now.size:
                return step.pick(value)
            return value

        cache = now.cache
        cache.step, cache.current = step, {}
        # Masks would hide padding, which steps do not have.
        own = {name: None if name.endswith("mask") else part(value) for name, value in options.items()}
        output = type(self._module).forward(self._module, *map(part, args), **own)
        for name, states_R in cache.current.items():
            cache.states.put(name, step, states_R)
        cache.step, cache.current = None, {}
        return output


class Mixers:
    """The mixers of a model, able to read step by step."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._forwards = [(module, _Mixer(module)) for module in modules]

    @contextmanager
    def reading(self, steps: Sequence[Step], cache: HybridCache, size: tuple[int, int]) -> Iterator[None]:
        """Let mixers read step by step while this thread is inside."""
        cache.step, cache.current = None, {}  # the last pass may have been interrupted
        with _FORWARDS.running(self._forwards, _Pass(steps, cache, size)):
            yield
