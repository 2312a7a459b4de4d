"""Programs that others have written for this API; each is skipped by name where it is not installed."""

import importlib
from types import ModuleType

import pytest

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


def needed(module: str, package: str) -> ModuleType:
    """Import a program within the test that needs it: what these warn of while they are imported is their own affair."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(f"needs {package}: pip install {package}")


def needs_tools(shared) -> None:
    """Skip where the server does not take tools."""
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "required", "max_tokens": 1}
    if shared.post("/v1/chat/completions", body).status_code == 400:
        pytest.skip("needs a server that takes tools")
