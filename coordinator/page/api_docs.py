"""/api for people: every path with its answer and parameters, from the OpenAPI document."""

from __future__ import annotations

from html import escape
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>The API of a Cairn coordinator</title>
  <link rel="icon" href="/favicon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/static/vendor/pico.min.css">
  <link rel="stylesheet" href="/static/page.css">
</head>
<body>
  <main class="container">
    <p><a href="/">Back to the run</a></p>
    <h1>The API</h1>
    <p>{about}</p>
    <p>The same for machines: <a href="/api/openapi.json">/api/openapi.json</a> (OpenAPI 3.1).</p>
    {paths}
  </main>
</body>
</html>
"""


def api_page(document: dict[str, Any]) -> str:
    """Return the page as HTML; everything in the document enters as text."""
    paths = "\n    ".join(_path(path, ways["get"]) for path, ways in document["paths"].items())
    return _PAGE.format(about=escape(document["info"]["description"]), paths=paths)


def _path(path: str, operation: dict[str, Any]) -> str:
    link = (
        f'<a href="{escape(path)}"><code>{escape(path)}</code></a>'
        if "{" not in path
        else f"<code>{escape(path)}</code>"
    )
    rows = "".join(
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{escape(_kind(p['schema']))}</td>"
        f"<td>{escape(p.get('description', ''))}</td></tr>"
        for p in operation.get("parameters", ())
    )
    table = f'<div class="wide"><table>{rows}</table></div>' if rows else ""
    return f"<section><h2>{link}</h2><p>{escape(operation['summary'])}.</p>{table}</section>"


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        kind = ", ".join(schema["enum"])
    elif schema["type"] == "integer":
        kind = "whole number"
    else:
        kind = "64 hexadecimal digits" if "pattern" in schema else "text"
    default = schema.get("default", "")
    return f"{kind} (without: {default})" if default not in ("", 2**40) else kind
