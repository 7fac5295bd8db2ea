"""What a site had last, kept for autoencoders that read one site and write another."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.reach.lenses import Counted
from interpose.sites.tree import Site
from interpose.taps import values
from interpose.taps.tap import named_arguments


class Given(Counted):
    """Keeps what a site had last, in this thread, while someone needs it."""

    def __init__(self, site: Site) -> None:
        if site.lens is not None and site.lens.needs_call:
            raise Unsupported(
                f"a transcoder cannot read {site.name!r}: it is no tensor that a module takes or gives."
            )
        self.site = site
        self.local = threading.local()
        self.handle: Any = None

    def _connect(self) -> None:
        module = self.site.module
        if self.site.tail.port == "input":
            self.handle = module.register_forward_pre_hook(self._taken, with_kwargs=True)
        else:
            self.handle = module.register_forward_hook(self._made, with_kwargs=True)

    def _disconnect(self) -> None:
        self.handle.remove()

    def off(self) -> None:
        """One less; this thread needs no value any more."""
        super().off()
        vars(self.local).clear()

    def _taken(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._keep(named_arguments(module, args, kwargs))

    def _made(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        self._keep(output)

    def _keep(self, value: Any) -> None:
        self.local.value = values.element(value, self.site.tail.leaf)

    def __reduce__(self) -> tuple[Any, ...]:
        return nn.Identity, ()  # copies of a hooked module get one that nobody asks

    @property
    def value(self) -> Tensor:
        """What the site had last."""
        found = getattr(self.local, "value", None)
        if not isinstance(found, Tensor):
            raise Unsupported(
                f"{self.site.name!r} has no value yet where an autoencoder reads it: it must come before what that "
                "writes, in the same forward pass."
            )
        return found if self.site.lens is None else self.site.lens.read(found, None)
