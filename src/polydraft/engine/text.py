"""Turning tokens into text one by one, with stop strings."""

import copy
from collections.abc import Collection, Sequence
from typing import Any

_INCOMPLETE = "\ufffd"
_OVERLAP_TOKENS = 4


class TextAssembler:
    """Turn one row's tokens into text.

    Text is held back while a character is incomplete or while it could be the beginning of a stop string.

    Parameters
    ----------
    tokenizer : a Hugging Face tokenizer, or None to make no text
    stop : sequence of str
        Stop strings: the text ends before the first one found. The string of a special token, which is not shown, stands for
        that token.
    markers : collection of int
        Special tokens to show in the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], markers: Collection[int] = ()) -> None:
        self._tokenizer, self.stop = tokenizer, [string for string in stop if string]
        self.markers = frozenset(markers)
        added = tokenizer.added_tokens_decoder.items() if markers else ()
        self._silent = {token for token, one in added if one.special} - self.markers
        special = getattr(tokenizer, "all_special_tokens", ()) if self.stop else ()
        self._stop_tokens = {tokenizer.convert_tokens_to_ids(string) for string in self.stop if string in special}
        self._window: list[int] = []
        """The last tokens, which are decoded again with each new one; those before are in the settled text."""
        self._settled_text = ""
        self._overlap = 0
        """Characters at the window's beginning that are already in the settled text."""
        self._released = 0
        self.text = ""
        """All text so far, including what is held back; ends before the stop string once one is found."""
        self.stopped = False

    def fork(self) -> "TextAssembler":
        """Return an independent copy."""
        fork = copy.copy(self)
        fork._window = self._window.copy()
        return fork

    def add(self, token: int) -> str:
        """Add a token and return the text to release with it."""
        if self._tokenizer is None:
            return ""
        if token in self._stop_tokens:
            self.stopped = True
            return self._release(len(self.text))
        # Decoding only the last tokens keeps this linear in the length of the text.
        self._window.append(token)
        decoded = self._decode(self._window)
        self.text = self._settled_text + decoded[self._overlap :]
        if len(self._window) > 16 and not decoded.endswith(_INCOMPLETE):
            self._settle(self._window, decoded)
        searched_from = max(0, self._released - max(map(len, self.stop), default=0))
        found = [at for string in self.stop if (at := self.text.find(string, searched_from)) >= 0]
        if found:
            self.stopped = True
            self.text = self.text[: min(found)]
            return self._release(len(self.text))
        if self.text.endswith(_INCOMPLETE):
            return ""
        return self._release(len(self.text) - self._possible_stop())

    def finish(self) -> str:
        """Return the text that was held back; call it at the end."""
        return self._release(len(self.text))

    def _decode(self, tokens: Sequence[int]) -> str:
        if self.markers:
            shown = [token for token in tokens if token not in self._silent]
            return str(self._tokenizer.decode(shown, skip_special_tokens=False))
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _settle(self, window: list[int], decoded: str) -> None:
        """Drop the first half of the window, except for a few tokens: many tokenizers drop the space before the first one."""
        half = len(window) // 2
        seam = half + _OVERLAP_TOKENS
        head, overlap, rest = (self._decode(part) for part in (window[:seam], window[half:seam], window[half:]))
        if head + rest[len(overlap) :] == decoded:
            self._settled_text += head[self._overlap :]
            self._window = window[half:]
            self._overlap = len(overlap)

    def _possible_stop(self) -> int:
        """Return the length of the longest suffix of the text that begins a stop string."""
        longest = min(max(map(len, self.stop), default=1) - 1, len(self.text))
        for length in range(longest, 0, -1):
            if any(string.startswith(self.text[-length:]) for string in self.stop if length < len(string)):
                return length
        return 0

    def _release(self, upto: int) -> str:
        piece = self.text[self._released : upto]
        self._released = max(self._released, upto)
        return piece
