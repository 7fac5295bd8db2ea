"""Files of results: `load_result` reads whatever `save` wrote as data."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from interpose.errors import FileError
from interpose.files.reading import parse_json, read_json, read_tensors

if TYPE_CHECKING:
    from interpose.results.result import Result

_FORMER = {"interpose.sweep": "SweepResult", "interpose.probe": "Probe"}


def load_result(path: str | Path) -> Result:
    """What a result's `save` wrote as ``.json`` or ``.safetensors``, to the last bit.

    ```python
    ip.logit_lens(model, "The Eiffel Tower is in").save("lens.json")
    lens = ip.load_result("lens.json")  # an ip.LogitLens
    ```

    Files of older versions are read too.

    Args:
        path: where it is.
    """
    packed = Path(path).suffix == ".safetensors"
    data, tensors = _unpacked(path) if packed else (read_json(path), {})
    return result_of(data, tensors, repr(str(path)))


def result_of(
    data: Any, tensors: Mapping[str, Tensor] | None = None, source: str = "this data"
) -> Result:
    """The result that some data is of, by its ``format``.

    Args:
        data: what `to_dict` of a result wrote.
        tensors: those that were written beside it.
        source: what errors call it.
    """
    from interpose.results.result import Result

    form = data.get("format") if isinstance(data, Mapping) else None
    name = _FORMER.get(str(form), str(form).removeprefix("interpose."))
    public = importlib.import_module("interpose")
    kind = getattr(public, name) if name in public.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, Result)):
        said = "it has no format" if form is None else f"its format is {str(form)[:60]!r}"
        raise FileError(f"{source} is not a result that interpose wrote: {said}.")
    return kind.from_dict(data, tensors, source)


def packed(result: Result) -> bytes:
    """A result as a safetensors file: tensors as they are, all else as JSON in its header."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    data = result.to_dict(tensors)
    about = {name: str(data[name]) for name in ("format", "version")}
    return save(tensors, metadata={**about, "data": json.dumps(data, allow_nan=False)})


def _unpacked(path: str | Path) -> tuple[Any, dict[str, Tensor]]:
    """The data and the tensors of a safetensors file, also as probes and tuned lenses wrote them at first."""
    tensors, texts = read_tensors(path)
    said = {
        name: parse_json(text, source=repr(str(path)))
        for name, text in texts.items()
        if text[:1] in "{["
    }
    kept = {name: {"tensor": name} for name in tensors}
    if "data" in said:
        return said["data"], tensors
    if "interpose.probe" in said:
        return {"format": "interpose.probe", **said["interpose.probe"], **kept}, tensors
    if texts.get("format") == "interpose.TunedLens 1":
        return {"format": "interpose.TunedLens", "version": 1, **said, **kept}, tensors
    raise FileError(
        f"{str(path)!r} is not a result that interpose wrote: its header has no format."
    )
