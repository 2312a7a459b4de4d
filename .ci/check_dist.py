"""Check what is in the wheel and the sdist of a folder: `python .ci/check_dist.py dist`."""

import re
import runpy
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

DRAFTS = Path("src/polydraft/drafts")
NATIVE = Path("src/polydraft/backends/native")
PAGE = Path("src/polydraft/serve/page")


def names_missing(names: set[str], wanted: list[str]) -> list[str]:
    """Return those wanted that no name ends with, below the one folder at the top."""
    return [want for want in wanted if not any(name == want or name.endswith("/" + want) for name in names)]


def prebuilt(platform: str) -> list[str]:
    """Return the compiled kernels that a wheel for a platform must hold: those of these sources."""
    if platform == "any":
        sys.stderr.write("note: no compiled kernels in the wheel; it was built without a C compiler\n")
        return []
    variants = runpy.run_path(str(NATIVE / "compiler.py"))["VARIANTS"]
    (machine,) = (name for name in variants if platform.endswith(f"_{name}"))
    return [str(variant.file(NATIVE.relative_to("src") / "prebuilt")) for variant in variants[machine]]


def main(folder: Path) -> int:
    """Print what is missing; 1 if anything is."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    weights = [str(file.relative_to("src")) for file in DRAFTS.rglob("*") if file.is_file()]
    assert len(weights) >= 8, weights
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_file,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(metadata_file).decode())
    description = str(metadata.get_payload())
    missing = names_missing(
        names,
        [
            "polydraft/py.typed",
            *(str(file.relative_to("src")) for file in NATIVE.glob("*.[ch]")),
            *(str(file.relative_to("src")) for file in PAGE.iterdir()),
            *prebuilt(wheel.stem.rpartition("-")[2]),
            "licenses/LICENSE",
            "licenses/NOTICE",
            "entry_points.txt",
            *weights,
        ],
    )
    missing += [f"{name} (stray)" for name in names if not name.startswith(("polydraft/", "polydraft-"))]
    with tarfile.open(sdist) as archive:
        wanted = ["LICENSE", "NOTICE", "README.md", "Makefile", "constraints.txt", "docs/tree.svg", "tests/test_readme.py"]
        missing += names_missing(set(archive.getnames()), [*wanted, *(f"src/{name}" for name in weights)])
    expected = {"Name": "polydraft", "License-Expression": "Apache-2.0", "Requires-Python": ">=3.11"}
    missing += [f"metadata {key}: {metadata[key]!r}" for key, value in expected.items() if metadata[key] != value]
    missing += [f"extra {name}" for name in ("gguf", "bench", "dev") if name not in metadata.get_all("Provides-Extra", [])]
    missing += [f"relative link in the description: {link}" for link in re.findall(r"\]\((?!https?://|#)[^)]*\)", description)]
    missing += ["description"] if len(description) < 2000 else []
    for line in missing:
        sys.stderr.write(f"missing or wrong: {line}\n")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
