"""A client that gets greedy text from OpenAI-compatible endpoints; standard library only."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from polydraft.errors import FailureError, UsageError

_COMPLETIONS, _CHAT = "/completions", "/chat/completions"
_SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of an endpoint, and the model to ask for."""

    url: str
    """Address of the server, with or without ``/v1``."""
    model: str
    chat: bool = False
    """Ask ``/v1/chat/completions`` instead of ``/v1/completions``."""
    timeout: float = 120.0
    """Seconds to wait for one answer."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url {self.url!r} is not a web address; allowed: http://HOST[:PORT][/v1] or https://...")
        if not self.timeout > 0:
            raise UsageError(f"--timeout {self.timeout:g} is out of range; allowed: above 0 seconds")

    @property
    def address(self) -> str:
        """The full address for requests."""
        base = self.url.rstrip("/")
        if base.endswith(_COMPLETIONS):
            return base
        return (base if base.endswith("/v1") else f"{base}/v1") + (_CHAT if self.chat else _COMPLETIONS)

    def complete(self, prompt: str | list[Mapping[str, Any]], max_tokens: int) -> str:
        """Return the greedy text that follows a prompt or, with `chat`, the messages of a conversation.

        Raises
        ------
        UsageError
            If messages are given without `chat`.
        FailureError
            If there is no answer, or not a usable one.
        """
        asked: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": False}
        if not isinstance(prompt, str) and not self.chat:
            raise UsageError("a prompt has messages, which /v1/completions does not take; add --chat, or use prompts of text")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        asked |= {"messages": messages} if self.chat else {"prompt": prompt}
        answer = self._ask(asked)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if self.chat else choice["text"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            where = "choices[0].message.content" if self.chat else "choices[0].text"
            raise FailureError(
                f"{self.address} answered without {where}; give an OpenAI-compatible --url, and try with or without --chat"
            )
        return text

    def _ask(self, asked: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.address, data=json.dumps(asked).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            message = " ".join(error.read(_SHOWN).decode("utf-8", "replace").split()) or error.reason
            raise FailureError(f"{self.address} answered HTTP {error.code} ({message}); check --url and --model") from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError, as are timeouts
            reason = getattr(error, "reason", None) or error or type(error).__name__
            raise FailureError(f"cannot reach {self.address} ({reason}); check that the server is running, and --url") from None
        try:
            return json.loads(content)
        except ValueError:
            start = content[:_SHOWN].decode("utf-8", "replace").strip()
            raise FailureError(f"{self.address} answered with something other than JSON: {start!r}; check --url") from None
