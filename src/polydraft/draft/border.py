"""A drawn tree and a trie in one round: where one ends and the other begins, and how a GPU builds both at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from polydraft.devices import captures
from polydraft.verify import Verdict


class Border:
    """The border between a round's drawn tree and its trie: the walk may cross it once, and never comes back.

    Parameters
    ----------
    depth : int
        Levels of drawn trees.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.nodes = 0
        """Nodes of the last drawn tree, which come before the trie's."""
        self._kept: list[int] = []
        """How many drawn nodes, root included, each row's last path has."""

    def cut(self, verdict: Verdict, keep_B: Tensor) -> tuple[Verdict, Tensor]:
        """Return the part of a verdict that lies in the drawn tree, and how many nodes each row keeps of it."""
        own_BD = verdict.path_BD < self.nodes
        steps_D = torch.arange(verdict.path_BD.shape[1], device=keep_B.device)
        own_keep_B = (own_BD & (steps_D < keep_B[:, None])).sum(1)
        # Entries beyond the path repeat some node of it; which one does not matter.
        stop = self._depth + 1
        path_BD, accepted_B = torch.where(own_BD, verdict.path_BD, 0)[:, :stop], (own_keep_B - 1).clamp(min=0)
        return replace(verdict, path_BD=path_BD, tokens_BD=verdict.tokens_BD[:, :stop], accepted_B=accepted_B), own_keep_B

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Store on the host how many nodes `cut` kept."""
        self._kept = [report[0] for report in reports]

    def drawn(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many of a row's accepted tokens were drawn: they come first."""
        return min(max(self._kept[row] - 1, 0), len(tokens))

    def behind(self, emitted: Sequence[Sequence[int]]) -> list[int]:
        """Return how many of each row's emitted tokens the drawn tree did not have."""
        return [max(len(tokens) - kept, 0) if tokens else 0 for tokens, kept in zip(emitted, self._kept, strict=True)]


class SideStream:
    """A CUDA stream for n-gram lookups that run while the draft drafts."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Run what is launched here concurrently with what is launched after it, up to `join`.

        Its results are used before the next round starts here, so their memory is not reused too early.
        """
        if not captures(device):
            yield
            return
        streams = torch.get_device_module(device)
        self._stream = self._stream or streams.Stream(device)
        self._stream.wait_stream(streams.current_stream(device))
        with streams.stream(self._stream):
            yield

    def join(self, device: torch.device) -> None:
        """Make later launches wait for this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)
