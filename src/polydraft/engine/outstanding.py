"""A round that the device works on, while the host may do something else."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Outstanding:
    """A launched round, whose outcome is on its way to the host."""

    outcome_BX: Tensor
    """On the host; to be had by `arrived` once the copy is over."""
    copied: torch.cuda.Event | None
    replayed: bool
    """Whether the round is a replayed recording."""

    @classmethod
    def send(cls, outcome_BX: Tensor, replayed: bool) -> "Outstanding":
        """Let an outcome travel, the round's only device-to-host copy, out of reach of the next round that overwrites it."""
        pinned = outcome_BX.device.type == "cuda"
        # Torch lends page-locked memory anew only when the copies into it are over, so any number may be under way.
        arriving_BX = torch.empty(outcome_BX.shape, dtype=outcome_BX.dtype, pin_memory=pinned)
        arriving_BX.copy_(outcome_BX, non_blocking=pinned)
        copied = None
        if pinned:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(outcome_BX.device))
        return cls(arriving_BX, copied, replayed)

    def arrived(self) -> Tensor:
        """Return the outcome once it is on the host; rounds launched later go on meanwhile."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.outcome_BX

    def wait(self) -> list[list[int]]:
        """Return the outcome as lists."""
        rows: list[list[int]] = self.arrived().tolist()
        return rows
