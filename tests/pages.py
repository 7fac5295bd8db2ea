"""What a page or a part of one may hold: nothing from outside, and no script but the one of `render/page.js`."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import interpose as ip

SCRIPT = (Path(ip.__file__).parent / "render" / "page.js").read_text("utf-8")
LINKS = ("src", "href", "xlink:href", "action", "srcset", "data", "poster", "formaction", "ping")
LOADING = ("link", "iframe", "frame", "object", "embed", "base", "form", "audio", "video", "applet")


class Page(HTMLParser):
    """The tags of a page with their attributes, its scripts and its styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.inside:
            self.inside[self._open].append(data)


def loads_nothing(text: str) -> None:
    """Fail if HTML refers to anything outside itself, or brings a script that is not the page's own."""
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in LOADING, tag
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} has {name}"
            if name in LINKS:
                assert re.match("data:image/|#", value or ""), f"{tag} {name}={value}"
    styles = [*page.inside["style"], *(each.get("style") or "" for _, each in page.tags)]
    assert not any(re.search(r"url\(|@import|expression", style) for style in styles)
    assert page.inside["script"] in ([], [SCRIPT])
    if "<!doctype" in text:
        policies = [each.get("content") for _, each in page.tags if "http-equiv" in each]
        digest = b64encode(sha256(SCRIPT.encode()).digest()).decode()
        allowed = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        assert policies == [f"{allowed}; script-src 'sha256-{digest}'"]
