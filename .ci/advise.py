"""Print what a reader may want to split or to join: long modules and tiny ones. Advice only; it never fails."""

from pathlib import Path

LONG, TINY = 400, 40
SOURCE = Path(__file__).parent.parent / "src" / "polydraft"

sizes = {path.relative_to(SOURCE): len(path.read_text().splitlines()) for path in sorted(SOURCE.rglob("*.py"))}
long = [f"{path} ({lines})" for path, lines in sizes.items() if lines > LONG]
tiny = [
    f"{path} ({lines})" for path, lines in sizes.items() if lines < TINY and path.name not in ("__init__.py", "__main__.py")
]
rooms = {"lab": [lines for path, lines in sizes.items() if path.parts[0] == "lab"]}
rooms["product"] = [lines for path, lines in sizes.items() if path.parts[0] != "lab"]
for name, lines in sorted(rooms.items(), reverse=True):
    print(f"{name}: {sum(lines):,} lines in {len(lines)} modules")
for title, found in ((f"over {LONG} lines, perhaps two ideas", long), (f"under {TINY} lines, perhaps part of another", tiny)):
    if found:
        print(f"advice: {title}: {', '.join(found)}")
