"""Discovery: from one probe forward to an `Anatomy`. No model is known by name.

Stacks of blocks are lists of modules in which each takes what the one before it gave. In each block
the residual stream is found by its sums (`stream.py`), attention by its kernel calls (`heads.py`), the
rest by what stands between two values of the stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import nn

from interpose.models.discovery.anatomy import Anatomy, Endpoint, Norm, Tower
from interpose.models.discovery.blocks import BlockReader
from interpose.models.discovery.norm_kind import describe as describe_norm
from interpose.models.discovery.record import Event, Recorder, in_and_out, inside
from interpose.models.discovery.stream import endpoint_of, is_norm, same
from interpose.sites.tree import ModuleTree


def discover(tree: ModuleTree, recorder: Recorder, dtype: torch.dtype) -> Anatomy:
    """Make sense of a recorded forward pass."""
    found = Anatomy(tokens=(recorder.batch, recorder.length))
    precision = torch.finfo(dtype).eps if dtype.is_floating_point else 1e-6
    stacks = _stacks(tree, recorder.events)
    for path, events in stacks:
        prefix = _prefix(path, [p for p, _ in stacks])
        blocks = [BlockReader(i, e, recorder, precision).read() for i, e in enumerate(events)]
        tower = Tower(prefix=prefix, path=path, blocks=blocks)
        tower.final_norm = _final_norm(events[-1], recorder.events)
        found.towers.append(tower)
    _ends(found, tree, recorder.events)
    ran = {event.path for event in recorder.events}
    for path, module in tree.modules():
        if not isinstance(module, nn.ModuleList) or not re.search(_SENSES, path.lower()):
            continue
        if len(module) and not any(f"{path}.{i}" in ran for i in range(len(module))):
            found.absent[f"{path} (blocks)"] = (
                "the probe did not run it: model.probe(inputs) with inputs that do finds its sites"
            )
    return found


def _stacks(tree: ModuleTree, events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Lists of modules that hand a value on from one to the next, outermost only."""
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event.path, event)
    found: list[tuple[str, list[Event]]] = []
    for path, module in tree.modules():
        if not isinstance(module, nn.ModuleList) or any(
            path.startswith(f"{event.path}.") for _, known in found for event in known
        ):
            continue
        called = [first[f"{path}.{i}"] for i in range(len(module)) if f"{path}.{i}" in first]
        if called and all(in_and_out(event) is not None for event in called):
            links = [_hands_on(a, b) for a, b in pairwise(called)]
            alone = len(called) == 1 and bool(inside(called[0].path, events))
            if (links and sum(links) >= len(links) / 2) or alone:
                found.append((path, called))
    return found


def _hands_on(a: Event, b: Event) -> bool:
    return any(same(made, given) for made in a.made for given in b.given if given.is_float)


def _prefix(path: str, paths: Sequence[str]) -> str:
    """What a tower's sites begin with: nothing for the only one or the language model's own."""
    if len(paths) == 1:
        return ""
    words = path.lower()
    for word, prefix in _TOWERS:
        if re.search(word, words):
            same_kind = [p for p in paths if re.search(word, p.lower())]
            return prefix if len(same_kind) == 1 else f"{prefix[:-1]}_{same_kind.index(path)}."
    rest = [p for p in paths if not any(re.search(word, p.lower()) for word, _ in _TOWERS)]
    number = rest.index(path)
    return "" if number == 0 else f"stack_{number}."


_SENSES = r"vision|visual|image|audio|speech"
_TOWERS = [
    (r"vision|visual|image", "vision."),
    (r"audio|speech", "audio."),
    (r"encoder", "encoder."),
    (r"decoder", "decoder."),
]


def _final_norm(last: Event, events: Sequence[Event]) -> Norm | None:
    pair = in_and_out(last)
    for event in events:
        if event.start > last.end and is_norm(event) and event.given and pair is not None:
            if same(event.given[0], pair[1]):
                return describe_norm(event)
    return None


def _whole(event: Event) -> Endpoint:
    return endpoint_of(event, "output", event.made[0])


def _ends(found: Anatomy, tree: ModuleTree, events: Sequence[Event]) -> None:
    """Where tokens come in and logits go out."""
    root: Any = tree.root
    called = {id(event.module): event for event in reversed(events)}
    for name, getter in (("embed", "get_input_embeddings"), ("unembed", "get_output_embeddings")):
        try:
            module = getattr(root, getter)()
        except (AttributeError, NotImplementedError):
            module = None
        event = None if module is None else called.get(id(module)) or _tied(module, events)
        if event is not None and (name == "embed" or event.given[0].is_float):
            setattr(found, name, _whole(event))
            if name == "embed":
                _embeddings(found, "hook_embed", [e for e in events if _is_table(e, event)], events)
    blocks = [block.path for tower in found.towers for block in tower.blocks]
    positions = [
        event
        for event in events
        if isinstance(event.module, nn.Embedding)
        and event.made
        and _POSITIONS.fullmatch(event.path.rsplit(".", 1)[-1].lower())
        and not any(event.path.startswith(path) for path in blocks)
    ]
    _embeddings(found, "hook_pos_embed", positions, events)
    for prefix in ("", "decoder."):
        found.pos_embed = found.pos_embed or found.embeddings.get(f"{prefix}hook_pos_embed")


def _is_table(event: Event, known: Event) -> bool:
    """Whether a call looks tokens up in the table of another: the same module, or a tied weight."""
    weight = getattr(known.module, "weight", None)
    if event.module is known.module:
        return True
    tied = weight is not None and getattr(event.module, "weight", None) is weight
    return tied and isinstance(event.module, nn.Embedding) and bool(event.made)


def _embeddings(found: Anatomy, name: str, calls: Sequence[Event], events: Sequence[Event]) -> None:
    """Give each embedding the prefix of the tower it feeds."""
    for event in calls:
        tower = _fed(event, found.towers, events)
        prefix = "" if tower is None else tower.prefix
        found.embeddings.setdefault(f"{prefix}{name}", _whole(event))


def _fed(event: Event, towers: Sequence[Tower], events: Sequence[Event]) -> Tower | None:
    """The tower that lies nearest to a module; of several, the one that runs next."""
    shared = {id(tower): _common(event.path, tower.path) for tower in towers}
    nearest = [tower for tower in towers if shared[id(tower)] == max(shared.values())]
    starts = {e.path: e.start for e in reversed(events)}
    after = [tower for tower in nearest if starts[tower.blocks[0].path] > event.start]
    return min(after, key=lambda tower: starts[tower.blocks[0].path], default=None) or next(
        iter(nearest), None
    )


def _common(a: str, b: str) -> int:
    """How many segments two paths begin with together."""
    pairs = zip(a.split("."), b.split("."))
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


_POSITIONS = re.compile(r"wpe|embed_positions|pos(ition)?(al|s)?_emb\w*")


def _tied(module: nn.Module, events: Sequence[Event]) -> Event | None:
    """A module that was called with the same weight as one that was not."""
    weight = getattr(module, "weight", None)
    for event in events:
        if weight is not None and getattr(event.module, "weight", None) is weight:
            return event
    return None
