"""Recurrent modules that read a tree level by level, each node from its parent's state.

Everything else of a model reads all nodes in one pass. Inside a `with` statement the mixers of a model
(`polydraft.models.odd.recurrent`) are called once per `Step`, with the tokens and the states of that step alone.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polydraft.errors import UsageError
from polydraft.models.cache import SpreadCache
from polydraft.models.forwards import ReplacedForwards
from polydraft.models.odd.recurrent import StateName, StateShape
from polydraft.trees import Block


@dataclass(frozen=True, eq=False)
class Step:
    """Tokens that mixers read together: R texts with C tokens each."""

    rows_R: Tensor
    sources_R: Tensor
    """Where each text's state is: 0 for committed text, else one more than a place."""
    targets_R: Tensor
    """Where the state after its tokens goes."""
    columns: Tensor | slice
    """Of their tokens, `[R, C]`; a slice is a level of the same columns in all rows, with a text for each of its nodes."""

    def pick(self, values_BTX: Tensor) -> Tensor:
        """Return what belongs to these tokens, `[R, C, ...]`."""
        if isinstance(self.columns, slice):
            return values_BTX[:, self.columns].flatten(0, 1)[:, None]
        return values_BTX[self.rows_R[:, None], self.columns]

    def place(self, values_RCX: Tensor, result_BTX: Tensor) -> None:
        """Put what belongs to these tokens where it belongs."""
        if isinstance(self.columns, slice):
            result_BTX[:, self.columns] = values_RCX.view(len(result_BTX), -1, *values_RCX.shape[2:])
        else:
            result_BTX[self.rows_R[:, None], self.columns] = values_RCX


def level_steps(block: Block, places_BT: Tensor, depths_BU: Tensor) -> Iterator[Step]:
    """Yield the levels of a block, upper ones first; without a look at values if the block knows them.

    Parameters
    ----------
    places_BT : Tensor
        Of the block's tokens.
    depths_BU : Tensor
        Of the tokens in all places, the block's included.
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
    """Yield the steps in which rows read so many tokens in a row and keep only the state at the end.

    Rows of equal length read theirs in one step; those that must read them singly, one token per step.
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
    """States of the committed text and of all uncommitted places."""

    def __init__(self, shapes: Sequence[StateShape], batch_size: int, device: torch.device) -> None:
        self._states = {
            shape.name: torch.full((batch_size, 1, *shape.sizes), shape.start, dtype=shape.dtype, device=device)
            for shape in shapes
        }
        self._starts = {shape.name: shape.start for shape in shapes}
        self._rows_B1 = torch.arange(batch_size, device=device)[:, None]

    def reserve(self, places: int) -> None:
        """Make room for so many places."""
        for name, states_BU in self._states.items():
            if (more := 1 + places - states_BU.shape[1]) > 0:
                fresh_BU = states_BU.new_zeros(len(states_BU), more, *states_BU.shape[2:])
                self._states[name] = torch.cat([states_BU, fresh_BU], dim=1)

    def take(self, name: StateName, step: Step) -> Tensor:
        """Return a copy of the states that a step begins with."""
        return self._states[name][step.rows_R, step.sources_R]

    def put(self, name: StateName, step: Step, states_R: Tensor) -> None:
        """Keep the states that a step ends with."""
        self._states[name][step.rows_R, step.targets_R] = states_R

    def gather(self, index_BX: Tensor) -> None:
        """Replace the first states of each row by others of it."""
        for states_BU in self._states.values():
            states_BU[:, : index_BX.shape[1]] = states_BU[self._rows_B1, index_BX]

    def forget(self, row: int, everywhere: bool = False) -> None:
        """Begin a new text; if told so, clear uncommitted places too."""
        for name, states_BU in self._states.items():
            states_BU[row, : None if everywhere else 1] = self._starts[name]

    def wipe(self) -> None:
        """Begin new texts in all rows, and clear uncommitted places too."""
        for name, states_BU in self._states.items():
            states_BU.fill_(self._starts[name])

    @property
    def num_rows(self) -> int:
        """Texts that there are states of."""
        return len(self._rows_B1)

    @property
    def address(self) -> int:
        """Where the first of them are: they move when room is made."""
        return next((states_BU.data_ptr() for states_BU in self._states.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(states_BU.nbytes for states_BU in self._states.values())


class _Layer:
    """Stands for a layer where models look into one: for stored positions, and before transformers 5.22 for states."""

    is_sliding = is_compileable = record_past = False

    def __init__(self, cache: "HybridCache", number: int) -> None:
        self._cache = cache
        self.conv_states = _LayerStates(cache.get_conv_state, number)
        self.recurrent_states = _LayerStates(cache.get_recurrent_state, number)

    @property
    def indexer_position_ids(self) -> Tensor:
        """Positions of all slots in use, `[3, B, S]`; the model appends those of the tokens that it reads."""
        return self._cache.positions_BS.expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Forget what the model would keep: slots know their positions."""


class _LayerStates:
    """States of one layer by their numbers."""

    def __init__(self, get: Callable[[int, int], Tensor], layer: int) -> None:
        self._get, self._layer = get, layer

    def __getitem__(self, state: int) -> Tensor:
        return self._get(self._layer, state)


class HybridCache(SpreadCache):
    """Slots for the layers with attention, and for a mixer that is running the states of its step."""

    def __init__(self, num_layers: int, capacity: int, owner: str, states: NodeStates) -> None:
        super().__init__(num_layers, capacity, owner)
        self.states = states
        self.current: dict[StateName, Tensor] = {}
        """States in use."""
        self.step: Step | None = None
        self.positions_BS = torch.empty(0, 0, dtype=torch.long)
        """Positions of the slots in use."""
        self.layers = [_Layer(self, number) for number in range(num_layers)]

    def _state(self, name: StateName) -> Tensor:
        assert self.step is not None, "states are asked for by mixers only"
        if name not in self.current:
            self.current[name] = self.states.take(name, self.step)
        return self.current[name]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the last inputs of a convolution, to be changed where they are."""
        return self._state((layer_idx, "conv", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Add inputs of a convolution; return them with those before."""
        state = self._state((layer_idx, "conv", state_idx))
        whole = torch.cat([state, conv_states], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return a state, to be changed where it is."""
        return self._state((layer_idx, "recurrent", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Replace a state."""
        return self._state((layer_idx, "recurrent", state_idx)).copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state; the one that a text begins with counts."""
        return True

    def is_capture_past(self, layer_idx: int) -> bool:
        """Whether states keep more of the past than they need."""
        return False

    def clear(self, row: int) -> None:
        """Overwrite what a row holds, its states included."""
        super().clear(row)
        self.states.forget(row, everywhere=True)

    def wipe(self) -> None:
        """Overwrite what all rows hold."""
        super().wipe()
        self.states.wipe()

    def adopt(self, other: Any, rows: int) -> bool:
        """Take over the storage of another cache of the same model."""
        assert isinstance(other, HybridCache)
        if other.states.num_rows != rows or not super().adopt(other, rows):
            return False
        self.states = other.states
        for row in range(rows):
            self.states.forget(row)
        return True

    @property
    def address(self) -> int:
        """Where keys and values, and states, begin."""
        return hash((super().address, self.states.address))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of states."""
        return super().nbytes + self.states.nbytes


@dataclass(frozen=True, eq=False)
class _Plan:
    steps: Sequence[Step]
    cache: HybridCache
    size: tuple[int, int]
    """Rows and tokens of the pass."""


class _Here(threading.local):
    """The plan of this thread's pass."""

    plan: _Plan | None = None


_HERE = _Here()
_REPLACED = ReplacedForwards()


class _Mixer:
    """Takes the place of one mixer's `forward`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = type(self._module).forward
        plan = _HERE.plan
        if plan is None or plan.cache.step is not None:  # a mixer inside another one reads that one's tokens
            return forward(self._module, *args, **options)
        results: list[Tensor] = []
        alone = True
        for step in plan.steps:
            output = self._read(plan, step, args, options)
            alone = isinstance(output, Tensor)
            outputs = (output,) if alone else output
            if not results:
                results = [part_RCF.new_zeros(*plan.size, *part_RCF.shape[2:]) for part_RCF in outputs]
            for result_BTF, part_RCF in zip(results, outputs, strict=True):
                step.place(part_RCF, result_BTF)
        return results[0] if alone else tuple(results)

    def _read(self, plan: _Plan, step: Step, args: Any, options: dict[str, Any]) -> Any:
        def part(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape[:2] == plan.size:
                return step.pick(value)
            return value

        cache = plan.cache
        cache.step, cache.current = step, {}
        # Masks are about padding, and no step has any.
        own = {name: None if name.endswith("mask") else part(value) for name, value in options.items()}
        output = type(self._module).forward(self._module, *map(part, args), **own)
        for name, states_R in cache.current.items():
            cache.states.put(name, step, states_R)
        cache.step, cache.current = None, {}
        return output


class Mixers:
    """The mixers of a model, which can read by steps."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._forwards = [(module, _Mixer(module)) for module in modules]

    @contextmanager
    def reading(self, steps: Sequence[Step], cache: HybridCache, size: tuple[int, int]) -> Iterator[None]:
        """Let mixers read by steps while this thread is inside."""
        cache.step, cache.current = None, {}  # a pass may have been interrupted
        _REPLACED.enter(self._forwards)
        try:
            if not all(isinstance(module.__dict__.get("forward"), _Mixer) for module, _ in self._forwards):
                raise UsageError("the forward method of a recurrent layer was replaced; load the model without such hooks")
            _HERE.plan = _Plan(steps, cache, size)
            yield
        finally:
            _HERE.plan = None
            _REPLACED.leave()
