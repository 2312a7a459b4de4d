"""Programs that others have written for this API; each is skipped by name where it is not installed."""

import asyncio
import gc
import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(autouse=True)
def tidied() -> Iterator[None]:
    """Collect event loops that a program leaves open while its warnings are still ignored."""
    yield
    asyncio.set_event_loop(None)
    gc.collect()


def needed(module: str, package: str) -> ModuleType:
    """Import a program within the test that needs it: what these warn of while they are imported is their own affair."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(f"needs {package}: pip install {package}")


def needs_tools(shared, path: str) -> None:
    """Skip where the server does not take tools."""
    chats = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 1}
    responses = {"input": "x", "tools": [{"type": "function", **TOOL["function"]}], "max_output_tokens": 1}
    answer = shared.post(path, chats if path == CHATS else responses)
    if answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_parameter":
        pytest.skip(f"needs a server that takes tools in {path}")
