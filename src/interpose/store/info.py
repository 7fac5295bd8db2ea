"""What a store says of itself: what it holds, and what it was made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from interpose.render.text import human_bytes, table
from interpose.store.records import About


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoreInfo:
    """What `Store.info` returns: it prints as a table.

    Attributes:
        data: all of it, in JSON's terms.
    """

    data: dict[str, Any]

    @classmethod
    def of(cls, path: str, about: About, counts: dict[str, Any]) -> StoreInfo:
        """Of a store, with what is counted of it."""
        said = dataclasses.asdict(about)
        said.pop("names")
        sites = {
            name: {"shape": list(one.shape), "dtype": one.dtype, "made": one.made}
            for name, one in about.sites.items()
        }
        return cls(data={"store": path, **counts, **said, "sites": sites})

    def _rows(self) -> list[tuple[str, str]]:
        data = self.data
        model, texts = data["model"], data["texts"]
        there = "complete" if data["complete"] else "not complete"
        bos = {None: "as the model does", True: "always", False: "never"}[texts["prepend_bos"]]
        return [
            ("holds", f"{data['rows']:,} rows, {data['tokens']:,} tokens, {there}"),
            ("takes", f"{human_bytes(data['nbytes'])} in {data['segments']:,} segments"),
            *((f"site {name}", _site(one)) for name, one in data["sites"].items()),
            ("positions", "all" if data["pos"] is None else str(data["pos"])),
            ("model", f"{model['name'] or '-'}, {model['kind']} in {model['dtype']}"),
            ("its weights", _short(model["weights"])),
            ("its config", _short(model["config"])),
            ("texts", "one by one" if texts["count"] is None else f"{texts['count']:,}"),
            ("their hash", _short(texts["fingerprint"])),
            ("tokenizer", _short(texts["tokenizer"])),
            ("BOS", bos),
            ("row", f"at most {texts['length']:,} tokens" if texts["length"] else "as it came"),
            ("hooks", "; ".join(data["hooks"]) or "none"),
            ("made by", ", ".join(f"{name} {one}" for name, one in data["versions"].items())),
        ]

    def __repr__(self) -> str:
        return table(("store", str(self.data["store"])), self._rows())

    def _repr_html_(self) -> str:
        from interpose.render.html import html_table

        return html_table(("store", str(self.data["store"])), self._rows())


def _site(one: dict[str, Any]) -> str:
    return f"{tuple(one['shape'])} in {one['dtype']}"


def _short(said: str | None) -> str:
    if said is None:
        return "-"
    kind, _, value = said.rpartition(":")
    return f"{kind} {value[:16]}".strip()
