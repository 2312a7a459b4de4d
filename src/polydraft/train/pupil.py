"""What training asks of a draft."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polydraft.train.conversations import Texts
from polydraft.train.laws import TargetLaws, Teacher


class Pupil(ABC):
    """A draft in training: computes its logits along texts, at one or several depths of drafting."""

    module: nn.Module
    """What is trained."""
    teacher: Teacher

    def prime(self, texts: Texts) -> None:
        """Look at some text before the first step, to start from the right scales."""
        return

    @abstractmethod
    def lesson(self, texts: Texts, depths: int) -> tuple[TargetLaws, list[tuple[Tensor, Tensor]]]:
        """Return the target's laws at the answers' positions, and for each depth rows of these and the draft's logits there."""

    @abstractmethod
    def export(self, folder: Path, details: dict[str, Any]) -> None:
        """Write the draft into a folder, for use."""

    @property
    @abstractmethod
    def depths(self) -> int:
        """Depths to train at."""
