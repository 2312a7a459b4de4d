"""A graphs without a GPU, for tests of what captures rely on; and shapes of small heads."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from polydraft.engine.graphs import GraphCache
from polydraft.engine.workspace import Workspace
from polydraft.models import Context, HeadShape
from polydraft.models.hf import HFModel

_WITHIN_A_ROUND = ("_fused_BTH", "_outputs_BWH", "_outputs_BDH", "_logits_BDV")


class StandIn(GraphCache):
    """Holds on to what a CUDA graph holds on to, in the order and number of the real graphs.

    A capture is the first function of its kind and copies of its inputs: a replay calls that function, on those copies, puts
    the outcome where the next replay overwrites it, and leaves the host as it was. Whatever else the function looks at must not
    change from one replay to the next, or the texts will tell. Tensors of the owners must stay where they are.

    Parameters
    ----------
    owners : callable
        Whatever holds tensors that live from round to round.
    before : int
        Runs before a capture.
    """

    def __init__(self, owners: Callable[[], Sequence[object]], before: int = 1) -> None:
        super().__init__(before)
        self.owners = owners
        self.kinds: list[Any] = []
        """Of all runs, in order."""
        self.replays = 0
        self._addresses: dict[Hashable, dict[str, int]] = {}

    def run(self, kind: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, bool]:
        self.kinds.append(kind)
        before = self.addresses()
        known = self._addresses.setdefault(kind, {})
        moved = [name for name, address in before.items() if known.setdefault(name, address) != address]
        assert not moved, f"tensors have moved between two replays: {moved}"
        outcome, replayed = super().run(kind, function, *inputs)
        assert self.addresses() == before, "a round has put a tensor elsewhere"
        self.replays += replayed
        return outcome, replayed

    def _capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Any:
        contexts = [owner for owner in self.owners() if isinstance(owner, Context)]
        return _Capture(function, tuple(tensor.clone() for tensor in inputs), contexts)

    def addresses(self) -> dict[str, int]:
        """Addresses of the tensors that live from round to round."""
        found: dict[str, int] = {}
        for number, owner in enumerate(self.owners()):
            for name, value in vars(owner).items():
                values = value if isinstance(value, dict) else {"": value}
                tensors = {key: one for key, one in values.items() if isinstance(one, Tensor)}
                if name not in _WITHIN_A_ROUND:
                    found |= {f"{number} {name} {key}": one.data_ptr() for key, one in tensors.items()}
        return found


def round_graphs(workspace: Workspace, before: int = 1) -> StandIn:
    """Return one for the rounds of a workspace."""

    def owners() -> list[object]:
        session, state = workspace.session, workspace.state
        parts = [part for builder in session._builders for part in (builder, builder.source)]
        for part in list(parts):
            parts += [vars(part)[name] for name in ("policy", "_choice", "texts", "riders") if vars(part).get(name) is not None]
            if getattr(vars(part).get("_distributions"), "_warper", None) is not None:
                parts.append(part._distributions._warper)
        return [state, state.warper, session, *parts, *workspace.contexts]

    return StandIn(owners, before)


def head_shape(target: HFModel, taps: tuple[int, ...] = (), **sizes: int) -> HeadShape:
    """Shape of a head with the target's own attention."""
    config = target.config
    return HeadShape(
        hidden_size=target.hidden_size,
        taps=taps,
        num_heads=config.num_attention_heads,
        num_key_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        **sizes,
    )


class _Capture:
    """One captured function of some tensors."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], contexts: Sequence[Context]) -> None:
        self._function, self._inputs, self._contexts = function, inputs, contexts
        self._output: Tensor | None = None

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for own, new in zip(self._inputs, inputs, strict=True):
            own.copy_(new)
        lengths = [context.lengths for context in self._contexts]
        output = self._function(*self._inputs)
        for context, known in zip(self._contexts, lengths, strict=True):
            context.settle(known)
        self._output = output.clone() if self._output is None else self._output.copy_(output)
        return self._output
