"""Programs that others have written for this API; each is skipped by name where it is not installed."""

import asyncio
import gc
import importlib
from collections.abc import Iterator
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
