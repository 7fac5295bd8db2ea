"""`Collector`: a detector that keeps tensors and facts; and saving what several of them have with one call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from interpose.engine.hooks import Detector
from interpose.engine.model import Model
from interpose.errors import FileError
from interpose.files.beside import load_beside, must_stay, save_beside
from interpose.files.schema import ANYTHING, Field, ListOf, MapOf, Record, Text, shown
from interpose.render.text import human_bytes
from interpose.sites.tree import Filter

FORMAT, VERSION = "interpose.collected", 1


class Collector(Detector):
    """A detector that keeps what it found, over as many forward passes as there are, until `clear`.

    ```python
    class Largest(ip.Collector):
        def read(self, value, hook):
            self.tensors[hook.name] = value.amax(-1)
            self.metadata["forwards"] = self.metadata.get("forwards", 0) + 1
    ```

    Args:
        site: where it looks.
        copies: as in `Detector`.

    Attributes:
        tensors: what it keeps of tensors, by name.
        metadata: what else it keeps: anything that JSON can hold.
    """

    def __init__(self, site: Filter = None, *, id: str | None = None, copies: bool = True) -> None:  # noqa: A002
        super().__init__(site, id=id, copies=copies)
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, Any] = {}

    def collected(self) -> Mapping[str, Tensor]:
        """What is saved of it."""
        return self.tensors

    def clear(self) -> None:
        """Forget everything found so far."""
        self.tensors.clear()
        self.metadata.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collected:
    """What one detector had when it was saved.

    Attributes:
        id: of the detector.
        kind: the name of its class.
        metadata: as it was.
        tensors: as they were, on the CPU.
    """

    id: str
    kind: str
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def __repr__(self) -> str:
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        count = "1 tensor" if len(self.tensors) == 1 else f"{len(self.tensors)} tensors"
        return f"Collected({self.id!r}, {self.kind}, {count}, {human_bytes(size)})"


def save_collected(path: str | Path, detectors: Model | Collector | Iterable[Any]) -> None:
    """Write what detectors have to a folder: ``collected.json``, and a safetensors file beside it.

    ```python
    ip.save_collected("found", model)          # every collector that is on the model
    ip.save_collected("found", [log, top])
    ```

    What was there before stays whole until the new one is complete.

    Args:
        path: of the folder.
        detectors: some, or a model, of which all that were registered on it are meant.
    """
    from safetensors.torch import save

    found = _each(detectors)
    tensors: dict[str, Tensor] = {}
    listed = []
    for number, detector in enumerate(found):
        names = {}
        for name, tensor in detector.collected().items():
            names[name] = f"{number}/{name}"
            tensors[names[name]] = tensor.detach().cpu().contiguous().clone()
        kind = type(detector).__name__
        listed.append(
            {"id": detector.id, "kind": kind, "metadata": detector.metadata, "tensors": names}
        )
    _must_be_json(listed)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"what was found is saved as a folder, and {str(path)!r} is a file."
        )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "collected.json"
    must_stay(file)
    data = {"format": FORMAT, "version": VERSION, "detectors": listed}
    save_beside(file, data, "tensors", save(tensors) if tensors else None)


def _each(detectors: Any) -> list[Collector]:
    if isinstance(detectors, Model):
        hooks = [handle.hook for handle in detectors.list_hooks()]
        return [hook for hook in hooks if isinstance(hook, Collector)]
    found = [detectors] if isinstance(detectors, Collector) else list(detectors)
    for detector in found:
        if not isinstance(detector, Collector):
            raise TypeError(
                f"save_collected takes collectors, such as ip.ActivationLog; got {detector!r}."
            )
    ids = [detector.id for detector in found]
    twice = {id for id in ids if ids.count(id) > 1}  # noqa: A001
    if twice:
        raise ValueError(f"two detectors have the id {min(twice)!r}; give each its own, id=...")
    return found


def _must_be_json(listed: list[dict[str, Any]]) -> None:
    """Say of which detector something is no JSON, before a file is touched."""
    for one in listed:
        try:
            json.dumps(one, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the metadata of detector {one['id']!r} is not what JSON holds: {error}. Tensors go to .tensors."
            ) from None


def load_collected(path: str | Path, device: Any = "cpu") -> dict[str, Collected]:
    """Read what `save_collected` wrote: by the id of each detector, in their order.

    Args:
        path: of the folder.
        device: where to put the tensors.
    """
    file = Path(path) / "collected.json"
    if not file.is_file():
        raise FileNotFoundError(f"nothing collected in {str(path)!r}: it has no collected.json.")
    must_stay(file)
    data, tensors = load_beside(file, device)
    field = Field(repr(str(file)))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FileError(f"{field.source} is not what save_collected writes.")
    if data.get("version") != VERSION:
        raise FileError(
            f"{field.source} is of version {shown(data.get('version'))}, and this interpose reads {VERSION}."
        )
    found = {}
    for one in _FILE(data, field)["detectors"]:
        names, metadata = one["tensors"], one["metadata"]
        if missing := {shown(name) for name in names.values() if name not in tensors}:
            raise FileError(f"{field.source} has no tensor {min(missing)}, which it names.")
        kept = {name: tensors[there] for name, there in names.items()}
        found[one["id"]] = Collected(
            id=one["id"], kind=one["kind"], metadata=metadata, tensors=kept
        )
    return found


_DETECTOR = Record(
    {"id": Text(), "kind": Text(), "metadata": MapOf(ANYTHING), "tensors": MapOf(Text())}
)
_FILE = Record({"format": ANYTHING, "version": ANYTHING, "detectors": ListOf(_DETECTOR, 100_000)})
