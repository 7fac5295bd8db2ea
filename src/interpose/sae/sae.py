"""`SAE`: what all sparse autoencoders have in common. Which latents fire is decided by each architecture.

Vectors are rows: ``pre = (x - b_dec) W_enc + b_enc``, ``codes = activation(pre)``, ``x' = codes W_dec + b_dec``. A
transcoder's output is of another site than its input (``d_out``), and may have a path around the latents (``W_skip``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from interpose.sae.codes import Codes

NORMALISATIONS = ("none", "layer_norm", "constant_norm_rescale")


class Frame(NamedTuple):
    """What a vector was divided by and how far it was moved before it was encoded, [..., 1] each."""

    scale: Tensor
    mean: Tensor | None = None


class SAE(nn.Module):
    """A sparse autoencoder, or a transcoder: vectors into few latents of many, and back.

    ```python
    sae = ip.SAE.from_pretrained("folder")
    codes = sae.codes(x)             # which latents fire, and how strongly
    sae.decode(codes)                # x again, nearly
    there = sae.attach(model)        # its latents are now sites of the model: see docs/sae.md
    ```

    Args:
        d_in: how many features the vectors have.
        d_sae: how many latents there are.
        d_out: how many features the output has, where that is of another site: a transcoder.
        skip: whether a linear map goes around the latents.
        subtract_bias: whether ``b_dec`` is taken off the input; by default in autoencoders, never in transcoders.
        normalize: what is done to each vector before, and undone after: ``none``, ``layer_norm``, or
            ``constant_norm_rescale`` (its norm becomes the square root of d_in).
        by_norm: whether latents count with the norms of their decoder rows, as if those were one.
        about: what it was trained on, in SAELens's words: ``model_name``, ``hook_name``, ...
        seed: of the first weights.
    """

    architecture: ClassVar[str] = ""
    dense_training: ClassVar[bool] = True
    """Whether gradients go to latents that do not fire too, so that training needs dense codes."""
    BIASES: ClassVar[tuple[str, ...]] = ("b_enc",)
    """What is in the units of the codes, [latent]."""

    TIED: ClassVar[bool] = False
    """Whether the encoder is the decoder."""
    W_enc: Tensor
    W_dec: Tensor
    W_skip: Tensor | None
    b_enc: Tensor
    b_dec: Tensor

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        d_out: int | None = None,
        skip: bool = False,
        subtract_bias: bool | None = None,
        normalize: str = "none",
        by_norm: bool = False,
        about: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if normalize not in NORMALISATIONS:
            raise ValueError(f"normalize is one of {', '.join(NORMALISATIONS)}; got {normalize!r}.")
        if min(d_in, d_sae, d_out or 1) < 1:
            raise ValueError(f"an SAE has sizes of 1 and more; got {d_in}, {d_sae}, {d_out}.")
        self.d_in, self.d_sae, self.d_out = d_in, d_sae, d_in if d_out is None else d_out
        self.is_transcoder = d_out is not None
        self.subtract_bias = not self.is_transcoder if subtract_bias is None else subtract_bias
        if self.subtract_bias and self.is_transcoder:
            raise ValueError(
                "the bias of a transcoder is of its output: it is not taken off the input."
            )
        if self.TIED and (by_norm or skip or d_out is not None):
            raise ValueError(
                f"the encoder of a {type(self).__name__} is its decoder: no d_out, skip or by_norm."
            )
        self.normalize = normalize
        self.by_norm = by_norm
        self.about: dict[str, Any] = dict(about or {})
        self.W_dec = nn.Parameter(torch.empty(d_sae, self.d_out))
        if not self.TIED:
            self.W_enc = nn.Parameter(torch.empty(d_in, d_sae))
        self.b_dec = nn.Parameter(torch.zeros(self.d_out))
        self.W_skip = nn.Parameter(torch.zeros(self.d_out, d_in)) if skip else None
        for bias in self.BIASES:
            self.register_parameter(bias, nn.Parameter(torch.zeros(d_sae)))
        if not self.W_dec.is_meta:  # else its weights are still to come
            self._start(seed)

    @torch.no_grad()
    def _start(self, seed: int) -> None:
        """First weights: decoder rows in random directions, of norm 0.1, which the encoder has too."""
        made = torch.Generator().manual_seed(seed)
        rows = torch.randn(self.d_sae, self.d_out, generator=made)
        self.W_dec.copy_(rows * (0.1 / rows.norm(dim=-1, keepdim=True)))
        if self.TIED:
            return
        if self.is_transcoder:
            self.W_enc.copy_(torch.randn(self.d_in, self.d_sae, generator=made) / self.d_in**0.5)
        else:
            self.W_enc.copy_(self.W_dec.T)

    # What it computes.

    def pre(self, x: Tensor) -> Tensor:
        """What each latent is given, [..., latent], before it is decided which of them fire."""
        x, _ = self.normalised(x)
        if self.subtract_bias:
            x = x - self.b_dec
        return self.weighed(x @ self.W_enc + self.b_enc)

    def weighed(self, pre: Tensor) -> Tensor:
        """With the norms of decoder rows, where they count."""
        return pre * self.W_dec.norm(dim=-1) if self.by_norm else pre

    def activated(self, pre: Tensor) -> Tensor:
        """How strongly each latent fires, [..., latent], mostly zeros."""
        raise NotImplementedError

    def sparse(self, pre: Tensor) -> Codes:
        """The same without the zeros."""
        return Codes.of_dense(self.activated(pre))

    def encode(self, x: Tensor) -> Tensor:
        """How strongly each latent fires at each vector, [..., latent], mostly zeros."""
        return self.activated(self.pre(x))

    def codes(self, x: Tensor) -> Codes:
        """Which latents fire at each vector, and how strongly."""
        return self.sparse(self.pre(x))

    def decode(self, codes: Codes | Tensor, x: Tensor | None = None) -> Tensor:
        """The output [..., d_out] of codes.

        Args:
            codes: what `codes` or `encode` gave.
            x: the vectors that they are of; needed where each is normalised, or a path goes around the latents.
        """
        rows = self.rows
        out = (
            codes.times(rows) if isinstance(codes, Codes) else codes.to(rows.dtype) @ rows
        ) + self.b_dec
        if x is None and (self.normalize != "none" or self.W_skip is not None):
            raise TypeError(f"{self!r} needs the vectors too: decode(codes, x).")
        if x is None:
            return out
        _, frame = self.normalised(x)
        if frame is not None and not self.is_transcoder:
            out = out * frame.scale
            out = out if frame.mean is None else out + frame.mean
        return out if self.W_skip is None else out + x.to(out) @ self.W_skip.T

    def forward(self, x: Tensor) -> Tensor:
        """The output for vectors, through few latents."""
        return self.decode(self.codes(x), x).to(x.dtype)

    @property
    def rows(self) -> Tensor:
        """What each latent adds when it fires with a strength of one, [latent, d_out]."""
        return self.W_dec / self.W_dec.norm(dim=-1, keepdim=True) if self.by_norm else self.W_dec

    def normalised(self, x: Tensor) -> tuple[Tensor, Frame | None]:
        """Vectors as they are encoded, and what was done to them."""
        if x.shape[-1:] != (self.d_in,):
            raise ValueError(
                f"{self!r} takes vectors of {self.d_in} features; got {tuple(x.shape)}."
            )
        x = x.to(self.W_enc)
        if self.normalize == "none":
            return x, None
        if self.normalize == "constant_norm_rescale":
            length = x.norm(dim=-1, keepdim=True)
            return x * (self.d_in**0.5 / length), Frame(length / self.d_in**0.5)
        mean = x.mean(-1, keepdim=True)
        std = (x - mean).std(-1, keepdim=True)
        return (x - mean) / (std + 1e-5), Frame(std, mean)

    def costs(self) -> Tensor:
        """What each latent adds when it fires with a strength of one, as one number: the norm of its decoder row."""
        norms: Tensor = self.W_dec.norm(dim=-1)
        return norms

    def moved(self, change: Tensor, x: Tensor) -> Tensor:
        """By how much the output changes, [..., d_out], when codes change by that much.

        Args:
            change: of the codes, [..., latent].
            x: the vectors that they are of.
        """
        if change.requires_grad:  # a gradient for all latents, those that did not change too
            moved = change.to(self.W_dec.dtype) @ self.rows
        else:
            some = (change != 0).flatten(0, -2).any(0).nonzero().flatten()
            moved = change[..., some].to(self.W_dec.dtype) @ self.rows[some]
        _, frame = self.normalised(x)
        return moved if frame is None or self.is_transcoder else moved * frame.scale

    # Other weights that compute the same.

    @torch.no_grad()
    def fold_norms(self) -> Self:
        """Give every decoder row a norm of one; codes are then in units of what they add. It computes the same."""
        norms = self.W_dec.norm(dim=-1)
        if not self.by_norm and not self._may_be_scaled:
            raise ValueError(
                f"which latents of {self!r} are the largest would change with the norms of their decoder rows."
            )
        self.W_enc.mul_(norms)
        self.W_dec.div_(norms[:, None])
        for name in self.BIASES:
            self.get_parameter(name).mul_(norms)
        self._scaled(norms, counted=self.by_norm)
        self.by_norm = False
        return self

    _may_be_scaled: ClassVar[bool] = True

    def _scaled(self, norms: Tensor, *, counted: bool) -> None:
        """After each latent was multiplied by a number; ``counted`` if that was in its value already."""

    @torch.no_grad()
    def fold_scale(self, into: float, out: float | None = None) -> Self:
        """Take vectors as they are, of one that was trained on vectors times a number. The codes are the same.

        Args:
            into: what the input was multiplied by.
            out: what the output was multiplied by, in a transcoder; by default the same.
        """
        out = into if out is None else out
        if self.by_norm:
            self.fold_norms()
        self.W_enc.mul_(into)
        self.W_dec.div_(out)
        self.b_dec.div_(out)
        if self.W_skip is not None:
            self.W_skip.mul_(into / out)
        return self

    # In a model, and in files.

    def attach(self, model: Any, site: Any = None, *, out: Any = None, name: str = "sae") -> Any:
        """Make its latents sites of a model, which goes on as before: see `interpose.sae.attaching.attach`."""
        from interpose.sae.attaching import attach

        return attach(self, model, site, out=out, name=name)

    @staticmethod
    def from_pretrained(path: str | Path, **options: Any) -> SAE:
        """An SAE from a folder or a file, in SAELens's layout or another's: see `interpose.sae.files.load_sae`."""
        from interpose.sae.files import load_sae

        return load_sae(path, **options)

    def save(self, folder: str | Path) -> Path:
        """Write ``cfg.json`` and ``sae_weights.safetensors`` in a folder, as SAELens reads them."""
        from interpose.sae.files import save_sae

        return save_sae(self, folder)

    def options(self) -> dict[str, Any]:
        """What its class is to be called with, besides its sizes, to make another such."""
        return {
            "d_out": self.d_out if self.is_transcoder else None,
            "skip": self.W_skip is not None,
            "subtract_bias": self.subtract_bias,
            "normalize": self.normalize,
            "by_norm": self.by_norm,
            "about": self.about,
        }

    def extra_repr(self) -> str:
        """Its sizes."""
        sizes = f"{self.d_in} -> {self.d_sae} latents"
        return f"{sizes} -> {self.d_out}" if self.is_transcoder else sizes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
