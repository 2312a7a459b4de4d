"""Memories of beams, and who works on them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from polydraft.beam.bank import FeatureBank
from polydraft.beam.slots import FEWEST_PLACES
from polydraft.engine.ownership import Owner
from polydraft.engine.recorder import Recorder, tell_obstacle
from polydraft.models import Context, FeatureHead, LanguageModel

_FIRST_PLACES = 2 * FEWEST_PLACES
"""Room for a forest that is made beforehand: most requests never ask for more."""


class BeamMemory:
    """One model's memory of one row, and the recorder of passes over it where these can be recorded.

    Parameters
    ----------
    model : LanguageModel or FeatureHead
    graphs : bool
        Record passes where the device can.
    """

    def __init__(self, model: LanguageModel | FeatureHead, graphs: bool) -> None:
        self._model = model
        self.context: Context = model.start(1, 8)
        self.bank = FeatureBank()
        self.recorder: Recorder | None = None
        obstacle: str | None = getattr(model, "graph_obstacle", None)
        if graphs and model.device.type == "cuda":
            if obstacle is None:
                self.recorder = Recorder(device=model.device)
            else:
                tell_obstacle(model, obstacle)

    def restart(self, room: int, longest: int) -> None:
        """Hold nothing, with room for so many tokens, or for a text of `longest` if the memory should not move."""
        # The prompt has no rows, all new tokens of the beams' common text have one, and so has a forest or two.
        self.bank.restart(longest - room + _FIRST_PLACES if self.recorder is not None else 0)
        if self.recorder is None:
            self.context = self._model.start(1, room)
            return
        self.context.span = None
        self.context.rewind([0])
        self.context.reserve(longest + _FIRST_PLACES)


class BeamWorkspace:
    """The memories of one request after another; kept, they let a later one replay what an earlier one recorded.

    Nothing of a text is kept: every request reads its whole prompt.

    Parameters
    ----------
    target : LanguageModel
    draft : LanguageModel or FeatureHead, optional
    graphs : bool
        Record passes where the device can.
    """

    def __init__(self, target: LanguageModel, draft: LanguageModel | FeatureHead | None, graphs: bool) -> None:
        self.target, self.draft, self.graphs = target, draft, graphs
        self.target_memory = BeamMemory(target, graphs)
        self.draft_memory = None if draft is None else BeamMemory(draft, graphs)
        self.claim: Callable[[], Owner | None] = lambda: None
        """Whose text is in the memories; a later run puts itself here."""
        self.spoiled = False
        """Whether something went wrong half-way, so that nobody knows what is in the memories."""
        self._at_work = False

    @torch.inference_mode()
    def begin(self, prompt_length: int, longest: int) -> None:
        """Make ready for a prompt and for the texts of up to `longest` tokens that it becomes."""
        with self.at_work():
            self.target_memory.restart(prompt_length + 64, longest)
            if self.draft_memory is not None:
                self.draft_memory.restart(prompt_length, longest)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the memories, whatever their run says meanwhile; an error on the way spoils them."""
        self._at_work = True
        try:
            yield
        except BaseException:
            self.spoiled = True
            raise
        finally:
            self._at_work = False

    @property
    def records(self) -> bool:
        """Whether passes are recorded, and worth keeping for other texts."""
        memories = (self.target_memory, self.draft_memory)
        return any(memory is not None and memory.recorder is not None for memory in memories)

    @property
    def idle(self) -> bool:
        """Whether a run may begin here."""
        run = self.claim()
        return not self._at_work and not self.spoiled and (run is None or run.done)
