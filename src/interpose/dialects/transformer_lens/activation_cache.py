"""`ActivationCache`: what a run kept, and the ways to take the residual stream apart.

The stream is a sum: embeddings, and what every attention and MLP adds. Each method here shows that sum in some
grain (`decompose_resid` by layer, `stack_head_results` by head, `stack_neuron_results` by neuron), so that parts can be
read through the unembedding (`logit_attrs`). The parts add up: with LayerNorm or RMSNorm, weights folded or not,
grouped queries, norms after the branches (gemma2), multiplied branches (granite). A model that norms the stream itself
(BERT) is refused.

Positions: ``pos_slice`` is anything `Slice` takes; an int drops the axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interpose.dialects.transformer_lens import decomposition
from interpose.dialects.transformer_lens.kept_values import KeptValues
from interpose.dialects.transformer_lens.logit_lens import LogitLensResult, logit_lens
from interpose.errors import Unsupported

Labelled = Tensor | tuple[Tensor, list[str]]
"""A stack of components, or the stack and a label for each."""


class ActivationCache(KeptValues):
    """Values of a run by name: ``cache["blocks.3.attn.hook_z"]``, ``cache["z", 3]``, ``cache["scale", 3, "ln1"]``.

    ```python
    logits, cache = model.run_with_cache("The Eiffel Tower is in")
    stack, labels = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    cache.logit_attrs(stack, tokens=" Paris", pos_slice=-1)        # [component, batch]
    ```
    """

    # The stream, layer by layer.

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Labelled:
        """The stream before each block up to a layer, stacked: what the logit lens reads.

        Args:
            layer: the last block whose input is shown; None or -1 goes on to the final stream.
            incl_mid: also the stream between attention and MLP.
            apply_ln: as the norm of ``layer`` passes it on. For the final stream that is the logit lens: each entry
                is normed as if it were the last, by a scale of its own and with the norm's summand.
            pos_slice: which positions.
            mlp_input: end with the stream between attention and MLP of ``layer``.
            return_labels: also a label for each, such as ``3_pre``, ``3_mid``, ``final_post``.
        """
        last = self._layer(layer, mlp_input)
        names: list[tuple[str, int, str]] = []
        for number in range(last):
            names.append(("resid_pre", number, f"{number}_pre"))
            if incl_mid:
                names.append(("resid_mid", number, f"{number}_mid"))
        if last == self._layers:
            names.append(("resid_post", last - 1, "final_post"))
        else:
            names.append(("resid_pre", last, f"{last}_pre"))
            if mlp_input:
                names.append(("resid_mid", last, f"{last}_mid"))
        parts = [
            (self._sliced(self[kind, number], pos_slice), label) for kind, number, label in names
        ]
        if apply_ln and last == self._layers:
            norm = self.apply_ln_to_stack
            parts = [(norm(part, recompute_ln=True), label) for part, label in parts]
            apply_ln = False
        return self._stack(parts, last, mlp_input, apply_ln, pos_slice, return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Labelled:
        """What each attention and MLP adds to the stream before a layer, stacked. They add up to it.

        Args:
            layer: whose input is taken apart; None or -1 for the final stream.
            mlp_input: the stream between attention and MLP of ``layer`` instead.
            mode: ``all``, ``attn`` or ``mlp``.
            apply_ln: as the norm that reads this stream passes each part on; see `apply_ln_to_stack`.
            pos_slice: which positions.
            incl_embeds: begin with the embeddings.
            return_labels: also labels, such as ``embed``, ``3_attn_out``.
        """
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f"mode is 'all', 'attn' or 'mlp'; got {mode!r}")
        self.model.stream.must_add_up()
        last = self._layer(layer, mlp_input)
        parts = decomposition.embeds(self, pos_slice) if incl_embeds else []
        for number in range(last + mlp_input):
            for kind in ("attn", "mlp"):
                if kind == "mlp" and (number == last or not decomposition.has_mlp(self, number)):
                    continue
                if mode in ("all", kind):
                    value = self._sliced(self[f"{kind}_out", number], pos_slice)
                    parts.append((value, f"{number}_{kind}_out"))
        return self._stack(parts, last, mlp_input, apply_ln, pos_slice, return_labels)

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """One kind of value of every layer up to (not with) a layer, stacked: [layer, ...]."""
        of = (sublayer_type,) if sublayer_type else ()
        return torch.stack([self[(activation_name, n, *of)] for n in range(self._layer(layer))])

    # By head and by neuron.

    def compute_head_results(self) -> None:
        """Keep what each head adds to the output of its attention (``attn.hook_result``), if it is not there."""
        for layer in range(self._layers):
            name = f"blocks.{layer}.attn.hook_result"
            if name not in self:
                self.keep(name, decomposition.head_results(self, layer))

    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
    ) -> Labelled:
        """What each head of the layers before ``layer`` adds to the stream: [layer * head, ..., d_model].

        Args:
            layer: heads of the layers before it; -1 for all.
            return_labels: also labels: ``L5H2``.
            incl_remainder: also everything of the stream that no head wrote, as ``remainder``.
            pos_slice: which positions.
            apply_ln: as the norm that reads this stream passes each part on; see `apply_ln_to_stack`.
        """
        last = self._layer(layer)
        parts = decomposition.heads(self, last, pos_slice)
        if incl_remainder:
            parts.append((self._rest(parts, last, False, pos_slice), "remainder"))
        return self._stack(parts, last, False, apply_ln, pos_slice, return_labels)

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Any = None,
        pos_slice: Any = None,
        project_output_onto: Tensor | None = None,
    ) -> Tensor:
        """What each neuron of a layer adds to the stream: [..., neuron, d_model].

        Args:
            layer: whose MLP.
            neuron_slice: which neurons.
            pos_slice: which positions.
            project_output_onto: [d_model] or [d_model, n]: give the product with it instead of the vector,
                without ever making the vectors.
        """
        return decomposition.neuron_results(
            self, layer, neuron_slice, pos_slice, project_output_onto
        )

    def stack_neuron_results(
        self,
        layer: int,
        pos_slice: Any = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Tensor | None = None,
        mlp_input: bool = False,
    ) -> Labelled:
        """What each neuron of the layers before ``layer`` adds to the stream: [neuron, ..., d_model].

        Args:
            layer: neurons of the layers before it; -1 for all.
            pos_slice: which positions.
            neuron_slice: which neurons of each layer.
            return_labels: also labels: ``L5N17``.
            incl_remainder: also everything else of the stream, as ``remainder``.
            apply_ln: as the norm that reads this stream passes each part on; see `apply_ln_to_stack`.
            project_output_onto: as in `get_neuron_results`.
            mlp_input: what is taken apart is the stream between attention and MLP of ``layer``.
        """
        last, onto = self._layer(layer, mlp_input), project_output_onto
        scale = None
        if apply_ln and onto is not None:
            onto, scale = decomposition.read_through_norm(self, onto, (last, mlp_input), pos_slice)
        parts = decomposition.neurons(self, last, neuron_slice, pos_slice, onto)
        if incl_remainder:
            rest = self._rest(parts, last, mlp_input, pos_slice, onto)
            parts.append((rest, "remainder"))
        return self._stack(parts, last, mlp_input, apply_ln, pos_slice, return_labels, onto, scale)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Labelled:
        """The stream before a layer in its finest parts: heads, neurons (or MLPs), embeddings, and all biases as one.

        Args:
            layer: whose input is taken apart; None or -1 for the final stream.
            mlp_input: the stream between attention and MLP of ``layer`` instead.
            expand_neurons: neurons one by one, rather than each MLP whole.
            apply_ln: as the norm that reads this stream passes each part on; see `apply_ln_to_stack`.
            pos_slice: which positions.
            return_labels: also labels.
            project_output_onto: as in `get_neuron_results`.
        """
        last, onto = self._layer(layer, mlp_input), project_output_onto
        scale = None
        if apply_ln and onto is not None:
            onto, scale = decomposition.read_through_norm(self, onto, (last, mlp_input), pos_slice)

        def project(parts: list[tuple[Tensor, str]]) -> list[tuple[Tensor, str]]:
            return parts if onto is None else [(value @ onto, label) for value, label in parts]

        parts = project(decomposition.heads(self, last + mlp_input, pos_slice))
        if expand_neurons:
            parts += decomposition.neurons(self, last, None, pos_slice, onto)
        else:
            layers = [n for n in range(last) if decomposition.has_mlp(self, n)]
            outs = [(self._sliced(self["mlp_out", n], pos_slice), f"{n}_mlp_out") for n in layers]
            parts += project(outs)
        parts += project(decomposition.embeds(self, pos_slice))
        parts.append((self._rest(parts, last, mlp_input, pos_slice, onto), "bias"))
        return self._stack(parts, last, mlp_input, apply_ln, pos_slice, return_labels, onto, scale)

    # Through the norm and the unembedding.

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Tensor:
        """Parts of the stream as a norm passes them on: centred, divided by the scale of the run, times its weight.

        The norm's own summand belongs to no part and is left out: the results add up to the norm's output
        without it. (TransformerLens leaves the weight out too, and is right if it has been folded.)

        Args:
            residual_stack: [component, ..., d_model].
            layer: whose norm: that before its attention; None or -1 for the final one. Where a block has none
                (olmo2), the stream is read as it is.
            mlp_input: the norm before its MLP.
            pos_slice: the positions that the stack has.
            batch_slice: which texts; they are taken from the stack too, if it has a batch axis.
            has_batch_dim: whether the stack has a batch axis.
            recompute_ln: give each part a scale of its own, as if it were the whole stream; the summand is in.
        """
        at = (self._layer(layer), mlp_input)
        return decomposition.through_norm(
            self, residual_stack, at, pos_slice, batch_slice, has_batch_dim, recompute_ln
        )

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """How much each part of the final stream adds to a token's logit, or to its lead over another's.

        Args:
            residual_stack: [component, ..., d_model].
            tokens: a token as a string or a number, one for each text, or one for each position.
            incorrect_tokens: tokens to compare with, in the same form.
            pos_slice: the positions that the stack has.
            batch_slice: which texts; they are taken from the stack too, if it has a batch axis.
            has_batch_dim: whether the stack has a batch axis.
        """
        directions = decomposition.directions(self.model, tokens)
        if incorrect_tokens is not None:
            other = decomposition.directions(self.model, incorrect_tokens)
            if other.shape != directions.shape:
                raise ValueError(
                    f"tokens and incorrect_tokens must have one shape; got {tuple(directions.shape[:-1])} "
                    f"and {tuple(other.shape[:-1])}."
                )
            directions = directions - other
        scaled = self.apply_ln_to_stack(
            residual_stack, -1, False, pos_slice, batch_slice, has_batch_dim
        )
        if directions.ndim == 2 and scaled.ndim == 4:  # one for each text, at all its positions
            directions = directions.unsqueeze(-2)
        stream = self.model.stream
        times = (stream.end_multiplier or 1.0) * (stream.logit_multiplier or 1.0)
        return (scaled * directions.to(scaled.device, scaled.dtype)).sum(-1) * times

    def logit_lens(self, **kwargs: Any) -> LogitLensResult:
        """What the model would say if it stopped at each layer; see `logit_lens.logit_lens` for the arguments."""
        return logit_lens(self, **kwargs)

    # Shared steps.

    @property
    def _layers(self) -> int:
        return self.model.tree.blocks()

    def _layer(self, layer: int | None, mlp_input: bool = False) -> int:
        """How many layers come before what is asked for."""
        last = self._layers if layer is None or layer == -1 else layer
        if not 0 <= last <= self._layers - mlp_input:
            most = self._layers - mlp_input
            end = "" if mlp_input else ", or -1 for all"
            raise ValueError(f"layer is from 0 to {most}{end}; got {layer}.")
        if mlp_input and f"blocks.{last}.hook_resid_mid" not in self.model.tree.table.sites:
            raise Unsupported(
                f"in blocks.{last} attention and MLP read the same stream: there is none between them for mlp_input."
            )
        return last

    def _sliced(self, value: Tensor, pos_slice: Any, dim: int = -2) -> Tensor:
        return (
            value if pos_slice is None else decomposition.as_slice(pos_slice).apply(value, dim=dim)
        )

    def _rest(
        self,
        parts: list[tuple[Tensor, str]],
        last: int,
        mlp_input: bool,
        pos_slice: Any,
        onto: Tensor | None = None,
    ) -> Tensor:
        """What of the stream before a layer the parts leave over."""
        if last == self._layers:
            whole = self["resid_post", last - 1]
        else:
            whole = self["resid_mid" if mlp_input else "resid_pre", last]
        whole = self._sliced(whole, pos_slice)
        whole = whole if onto is None else whole @ onto
        return whole - sum((value for value, _ in parts), torch.zeros_like(whole))

    def _stack(
        self,
        parts: list[tuple[Tensor, str]],
        last: int,
        mlp_input: bool,
        apply_ln: bool,
        pos_slice: Any,
        return_labels: bool,
        onto: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Labelled:
        if parts:
            stack = torch.stack([value for value, _ in parts])
        else:
            like = self._sliced(self["resid_pre", 0], pos_slice)
            like = like if onto is None else like @ onto
            stack = like.new_zeros((0, *like.shape))
        if scale is not None:
            stack = stack / scale
        elif apply_ln and onto is None:
            stack = self.apply_ln_to_stack(
                stack, last, mlp_input, pos_slice, has_batch_dim=self.has_batch_dim
            )
        return (stack, [label for _, label in parts]) if return_labels else stack
