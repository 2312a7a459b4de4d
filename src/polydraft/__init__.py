"""polydraft: many drafts, one target, exact output."""

from polydraft.engine import Decoder, Generation, StopReason, TokenEvent
from polydraft.errors import FailureError, PolydraftError, UsageError
from polydraft.sampling import SamplingParams

__version__ = "0.1.0"
