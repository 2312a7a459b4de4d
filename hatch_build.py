"""What building a package adds: the README as an index shows it, without relative links, and compiled kernels in the wheel."""

import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


class CustomBuildHook(BuildHookInterface):
    """Puts the native kernels into the wheel, compiled for the kinds of CPU of this architecture; without a compiler, none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them, and name the platform that the wheel is then for."""
        if version == "editable":  # sources change: compile on first use
            return
        room = "polydraft/backends/native"
        self.scratch = tempfile.TemporaryDirectory()
        tag, files = runpy.run_path(str(Path(self.root, "src", room, "compiler.py")))["prebuild"](Path(self.scratch.name))
        if files:
            build_data.update(pure_python=False, tag=f"py3-none-{tag}")
            build_data["force_include"].update({str(file): f"{room}/prebuilt/{file.name}" for file in files})
        names = ", ".join(file.name for file in files) or "none; they are compiled on first use"
        self.app.display_info(f"native kernels: {names}")
