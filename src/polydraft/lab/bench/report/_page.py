"""The frame of a self-contained page."""

from importlib.resources import files

from polydraft.lab.svg import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses any request of this page."""


def page(title: str, body: str, *, before: str = "", script: str = "") -> str:
    """Return a whole page.

    Parameters
    ----------
    title : str
        Plain text.
    body, before : str
        HTML: the page's main part, and what precedes it.
    script : str
        Name of a file of this package, if there is one.
    """
    ending = f"<script>\n{_file(script)}</script>\n" if script else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_file("style.css")}</style>
</head>
<body>
{before}<main>
{body}
</main>
{ending}</body>
</html>
"""


def _file(name: str) -> str:
    return (files("polydraft.lab.bench.report") / name).read_text(encoding="utf-8")
