"""What `generate_batch` returns: the texts of all requests, and captured rows that say whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from interpose.engine.cache import Cache
from interpose.render.text import human_bytes, table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """Whose rows some rows are: the request, the position in its text, and the token there, each [row]."""

    request: Tensor
    position: Tensor
    token: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows(Labels):
    """The rows of one site in the order they were computed, each with its labels.

    ``values`` is [row, ...]; ``axes`` names its axes after the first.
    """

    values: Tensor
    axes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        requests = len(self.request.unique())
        shape = ", ".join(("row", *self.axes))
        return f"Rows({tuple(self.values.shape)} [{shape}], of {requests} requests)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchResult:
    """The texts of a batch by request (the number of the prompt), and the values captured on the way.

    ```python
    result = model.generate_batch(["The cat", "One two"], names_filter="blocks.*.hook_resid_post")
    result.text[0]                                         # prompt and what followed
    result.sequence("blocks.3.hook_resid_post", 0)         # [pos, d_model]: that text's rows in order
    result.rows("blocks.3.hook_resid_post").request        # [row]: whose each row is
    ```

    A text has one row per token but the last, which was generated and never fed to the model. Sites of
    the unembedding have only the rows that a token was drawn from, one per generated token.
    """

    prompts: Mapping[int, list[int]]
    generated: Mapping[int, list[int]]
    text: Mapping[int, str] | None = None
    logprobs: Mapping[int, list[float]] = field(default_factory=dict)
    forwards: int = 0
    cache: Cache = field(default_factory=Cache)
    labels: Mapping[str, Labels] = field(default_factory=dict)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Prompt and generated tokens, by request."""
        return {
            request: self.prompts[request] + self.generated[request] for request in self.prompts
        }

    def rows(self, site: str) -> Rows:
        """All rows of a site, in the order the model computed them."""
        values = self.cache[site]
        key = self.cache._key(site)
        assert key is not None
        label = self.labels[key]
        return Rows(
            values=values,
            request=label.request,
            position=label.position,
            token=label.token,
            axes=self.axes[key],
        )

    def sequence(self, site: str, request: int) -> Tensor:
        """One request's rows of a site in order of position: [pos, ...]."""
        rows = self.rows(site)
        if request not in self.prompts:
            raise KeyError(f"no request {request!r}; there are 0 to {len(self.prompts) - 1}.")
        mine = (rows.request == request).nonzero().flatten()
        mine = mine[rows.position[mine].argsort()]
        return rows.values[mine.to(rows.values.device)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data: texts by request, and the rows of each site as lists."""
        sites = {}
        for name in self.cache:
            rows = self.rows(name)
            sites[name] = {
                "values": rows.values.tolist(),
                "axes": list(rows.axes),
                "request": rows.request.tolist(),
                "position": rows.position.tolist(),
                "token": rows.token.tolist(),
            }
        return {
            "prompts": dict(self.prompts),
            "generated": dict(self.generated),
            "text": None if self.text is None else dict(self.text),
            "logprobs": dict(self.logprobs),
            "sites": sites,
        }

    def __repr__(self) -> str:
        drawn = sum(map(len, self.generated.values()))
        kept = sum(value.numel() * value.element_size() for value in self.cache.values())
        title = (
            f"BatchResult: {len(self.prompts)} requests, {drawn} tokens generated in "
            f"{self.forwards} forward passes; {len(self.cache)} sites kept, {human_bytes(kept)}"
        )
        lines = [
            (str(request), str(len(ids)), str(len(self.generated[request])), self._ending(request))
            for request, ids in self.prompts.items()
        ]
        return table(("request", "prompt", "generated", "ends with"), lines, title=title)

    def _ending(self, request: int) -> str:
        if self.text is not None:
            return repr(self.text[request][-40:])
        return " ".join(map(str, self.tokens[request][-8:]))
