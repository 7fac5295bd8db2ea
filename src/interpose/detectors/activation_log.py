"""`ActivationLog`: the values of sites, of the last forward pass or of all, until they are cleared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from interpose.detectors.collector import Collector
from interpose.engine.points import HookPoint
from interpose.errors import NothingMatched, SiteNotFound
from interpose.explain.words import some
from interpose.models.running.masks import mask_at
from interpose.sites.tree import Filter


class ActivationLog(Collector):
    """Keeps the values of sites: those of the last forward pass, or of all of them.

    ```python
    log = ip.ActivationLog(("resid_post", 3), keep="all")
    with model.hooks([log]):
        for texts in batches:
            model(texts)
    log.batches()       # a tensor for each forward pass
    log.vectors()       # [token, d_model], without padding
    ```

    What the model takes and returns are sites too: ``ip.ActivationLog(["input.*", "output.logits"])``.

    Args:
        site: where.
        keep: ``last`` or ``all``: which forward passes to keep the values of.
        dtype: what to keep them in; by default their own.
        device: where to keep them.
    """

    def __init__(
        self,
        site: Filter = None,
        *,
        keep: str = "last",
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        id: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(site, id=id, copies=False)
        if keep not in ("last", "all"):
            raise ValueError(f"keep is 'last' or 'all'; got {keep!r}")
        self.keep = keep
        self.dtype = dtype
        self.device = torch.device(device)
        self._kept: dict[str, list[Tensor]] = {}
        self._real: dict[str, list[Tensor | None]] = {}

    def read(self, value: Tensor, hook: HookPoint) -> None:
        """Keep a value, and which of it is padding."""
        name = f"{hook.name}#{hook.call}" if hook.call and "#" not in hook.name else hook.name
        dtype = self.dtype if self.dtype is not None and value.is_floating_point() else value.dtype
        with torch.inference_mode(False), torch.no_grad():
            kept = value.detach().to(self.device, dtype, copy=True)
            mask = _mask(value, hook)
            real = None if mask is None else mask.to(self.device) != 0
        if self.keep == "last":
            self._kept[name], self._real[name] = [kept], [real]
        else:
            self._kept.setdefault(name, []).append(kept)
            self._real.setdefault(name, []).append(real)
        self.tensors[name] = kept
        about = self.metadata.setdefault(name, {"forwards": 0, "shapes": []})
        about["forwards"] += 1
        about["shapes"] = [list(part.shape) for part in self._kept[name]]
        about["dtype"] = str(dtype).removeprefix("torch.")

    def __getitem__(self, site: str) -> Tensor:
        """The value of the last forward pass; of a module's third call in it: ``log["cell#2"]``."""
        return self._kept[self._name(site)][-1]

    def batches(self, site: str | None = None) -> list[Tensor]:
        """All values kept, one for each forward pass.

        Args:
            site: its name; may be left out if there is one.
        """
        return list(self._kept[self._name(site)])

    def vectors(self, site: str | None = None) -> Tensor:
        """All values kept as [token, ...] (of a model without text [sample, ...]), padding left out.

        Args:
            site: its name; may be left out if there is one.
        """
        name = self._name(site)
        pairs = zip(self._kept[name], self._real[name])
        found = [kept[real] if real is not None else kept for kept, real in pairs]
        return torch.cat([part if part.ndim else part[None] for part in found])

    def collected(self) -> Mapping[str, Tensor]:
        """Every value kept; of several of one site, each with its number."""
        return {
            name if self.keep == "last" else f"{name}/{number}": value
            for name, values in self._kept.items()
            for number, value in enumerate(values)
        }

    def clear(self) -> None:
        """Forget everything kept so far."""
        super().clear()
        self._kept.clear()
        self._real.clear()

    def _name(self, site: str | None) -> str:
        if not self._kept:
            raise NothingMatched(
                f"{self.id!r} has kept nothing yet: run the model with it, "
                "model.run_with_hooks(x, hooks=[log]) or model.register(log)."
            )
        if site is None:
            if len(self._kept) > 1:
                raise ValueError(f"say which site: {some(map(repr, self._kept))}.")
            return next(iter(self._kept))
        if site not in self._kept:
            raise SiteNotFound(
                f"{self.id!r} has nothing of {site!r}; it has {some(map(repr, self._kept))}."
            )
        return site

    def __repr__(self) -> str:
        kept = ", ".join(f"{name} {len(values)}x" for name, values in self._kept.items())
        return f"ActivationLog({vars(self)['site']!r}, keep={self.keep!r}; {kept or 'nothing yet'})"


def _mask(value: Tensor, hook: HookPoint) -> Tensor | None:
    """Which of a value [batch, pos, ...] is no padding; None of a value without positions of text."""
    tokens = hook.given.get("input_ids")
    of_text = hook.pos_axis == 1 and hook.axes[0] == "batch"
    if not hook.axes and tokens is not None:  # what the model itself takes and returns
        of_text = value.ndim > 1 and value.shape[:2] == tokens.shape
    if not of_text:
        return None
    mask = mask_at(hook, 1)
    if mask is None or mask.shape != value.shape[:2]:
        return torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)
    return mask
