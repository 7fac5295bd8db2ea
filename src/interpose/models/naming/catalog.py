"""`model.sites` of a transformer: every semantic site, blocks that are alike in one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from interpose.engine.catalog import Sites
from interpose.models.naming.tree import SemanticTree
from interpose.sites.tree import Filter, Site


class SemanticSites(Sites):
    """Sites by canonical name. Takes every other name too, module paths included."""

    _tree: SemanticTree
    _header = ("site", "value", "what it is")

    def _all(self) -> Iterator[Site]:
        chosen = self._chosen
        if chosen is None:
            chosen = [site for _, site in self._tree.everything()]
        for site in chosen:
            yield self._informed(site)

    def _informed(self, site: Site) -> Site:
        found = super()._informed(site)
        return found if site.kind is None else replace(found, aliases=site.aliases)

    def select(self, wanted: Filter) -> SemanticSites:
        """The sites that a filter means."""
        chosen = [site for site, _ in self._tree.select(wanted)]
        return SemanticSites(self._tree, self._seen, self._calls, chosen)

    @property
    def absent(self) -> dict[str, str]:
        """Sites that models of this kind may have and this one has not, each with the reason."""
        return dict(self._tree.table.absent)

    def _rows(self) -> list[tuple[str, str, str]]:
        rows: dict[tuple[str, str], list[Site]] = {}
        for site in self._all():
            axes = f"[{', '.join(site.axes)}]" if site.axes else ""
            shape = self._about(site) or axes
            rows.setdefault((_without_layer(site), shape), []).append(site)
        return [
            (_with_layers(name, sites), shape, sites[0].about or type(sites[0].module).__name__)
            for (name, shape), sites in rows.items()
        ]

    def _title(self) -> str:
        absent = len(self._tree.table.absent)
        more = f", {absent} absent: model.sites.absent" if absent else ""
        return f"Sites of {self._tree.label}: {len(self)}{more}"


def _without_layer(site: Site) -> str:
    if site.layer is None:
        return site.name
    return site.name.replace(f"blocks.{site.layer}.", "blocks.{}.", 1)


def _with_layers(name: str, sites: list[Site]) -> str:
    layers = [site.layer for site in sites if site.layer is not None]
    if not layers:
        return name
    if len(layers) == 1:
        return name.format(layers[0])
    whole = layers == list(range(layers[0], layers[-1] + 1))
    return name.format(f"{layers[0]}..{layers[-1]}" if whole else ",".join(map(str, layers)))
