"""What a package index shows: the README, without what leads nowhere outside the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def without_relative_links(text: str) -> str:
    """Leave out pictures with relative addresses, and keep the words of relative links."""
    text = re.sub(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?://|#)[^)]*\)", r"\1", text)


class CustomMetadataHook(MetadataHookInterface):
    """Gives the package its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write it from the README."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}
