"""`HookedTransformer` and its kin: TransformerLens's model classes, as views of models of transformers.

Nothing is copied, converted or replaced: the model is the one that transformers loads, with its own weights and its own
attention kernel. So there is nothing to be folded: methods that need a norm's weight apply it (`ActivationCache`).
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from torch import Tensor, nn

from interpose.dialects.transformer_lens.config import HookedTransformerConfig
from interpose.dialects.transformer_lens.lens_hooks import LensHooks
from interpose.dialects.transformer_lens.lens_text import (
    LensText,
    predict_next_sentence,
    predictions,
)
from interpose.dialects.transformer_lens.lens_weights import LensWeights
from interpose.models import loading
from interpose.models.naming import names

_NICKNAMES = {"gpt2-small": "gpt2"}
_ORGANISATIONS = {
    "pythia-": "EleutherAI",
    "gpt-neo": "EleutherAI",
    "gpt-j": "EleutherAI",
    "opt-": "facebook",
    "gemma-": "google",
    "bloom-": "bigscience",
    "Llama-": "meta-llama",
    "Mistral-": "mistralai",
    "Qwen": "Qwen",
    "phi-": "microsoft",
}


class HookedTransformer(LensHooks, LensText, LensWeights):
    """A model of transformers, under the names of TransformerLens's `HookedTransformer`.

    ```python
    model = HookedTransformer.from_pretrained("gpt2-small")
    logits, cache = model.run_with_cache("The cat sat on the")
    cache["pattern", 5], model.blocks[5].attn.W_Q, model.W_O[5, 2], model.cfg.n_layers
    ```
    """

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        refactor_factored_attn_matrices: bool | None = None,
        hf_model: nn.Module | None = None,
        device: str | torch.device | None = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        fold_value_biases: bool | None = None,
        default_prepend_bos: bool | None = None,
        default_padding_side: str | None = None,
        dtype: torch.dtype | str | None = torch.float32,
        **options: Any,
    ) -> Self:
        """Load a model by name (TransformerLens's nicknames too) or folder, or look into one that is loaded.

        Args:
            model_name: ``gpt2-small``, ``EleutherAI/pythia-70m``, a folder, or ``pocket``.
            fold_ln: accepted. Weights stay as they are, and methods take the norm's weight into account. True is warned
                about, since ``W_*`` then differ from TransformerLens's; so with the other four flags of processing.
            center_writing_weights: as ``fold_ln``.
            center_unembed: as ``fold_ln``.
            refactor_factored_attn_matrices: as ``fold_ln``.
            hf_model: a loaded model to look into; it stays as it is.
            device: where to put it.
            n_devices: more than one spreads the layers (transformers' ``device_map="auto"``).
            tokenizer: instead of the model's own.
            fold_value_biases: as ``fold_ln``.
            default_prepend_bos: whether texts begin with a BOS token unless said otherwise; by default they do.
            default_padding_side: where shorter texts of a batch are padded; by default where the tokenizer does.
            dtype: of the weights.
            **options: for transformers' ``from_pretrained``.
        """
        flags = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
            "fold_value_biases": fold_value_biases,
        }
        _beware_of_processing([name for name, value in flags.items() if value])
        if n_devices > 1:
            options["device_map"] = "auto"
        if hf_model is None:
            loaded = loading.load(_on_hub(model_name), device=device, dtype=dtype, **options)
            module, found, processor = loaded.module, loaded.tokenizer, loaded.processor
        else:
            module = hf_model if device is None else hf_model.to(device)
            found, processor = None, None
            if tokenizer is None:
                found = loading.tokenizer_of(_on_hub(model_name))
        model = cls(
            module, tokenizer=found if tokenizer is None else tokenizer, processor=processor
        )
        if default_prepend_bos is not None:
            model.default_prepend_bos = default_prepend_bos
        model.default_padding_side = default_padding_side
        return model

    @classmethod
    def from_pretrained_no_processing(cls, model_name: str, **options: Any) -> Self:
        """Load a model with its weights as they are, which is what `from_pretrained` does too."""
        return cls.from_pretrained(model_name, **options)

    @property
    def cfg(self) -> HookedTransformerConfig:  # type: ignore[override]
        """What the model is like, and its flags."""
        found = vars(self).get("_lens_cfg")
        if found is None:
            found = HookedTransformerConfig(self, default_prepend_bos=self.default_prepend_bos)
            self._lens_cfg = found
        return found

    def __call__(self, input: Any = None, *second: Any, **kwargs: Any) -> Any:
        """Run the model; a second argument is the ``return_type``."""
        if second:
            (kwargs["return_type"],) = second
        return super().__call__(input, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the model."""
        return self(*args, **kwargs)

    # Flags: which sites None means besides the primary ones. Any can be hooked by name without them.

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Make ``attn.hook_result`` part of everything."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Make ``hook_q_input``, ``hook_k_input`` and ``hook_v_input`` part of everything."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Make ``hook_attn_in`` part of everything."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Make ``hook_mlp_in`` part of everything."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in


class TransformerBridge(HookedTransformer):
    """The same as TransformerLens's newer class: filters also see its names, such as ``blocks.0.attn.o.hook_in``."""

    _prepends_bos = None
    compatibility_mode = False

    @classmethod
    def boot_transformers(
        cls,
        model_name: str,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = torch.float32,
        tokenizer: Any = None,
        hf_model: nn.Module | None = None,
        **options: Any,
    ) -> Self:
        """Load a model, or look into one that is loaded; see `HookedTransformer.from_pretrained`."""
        return cls.from_pretrained(
            model_name,
            device=device,
            dtype=dtype,
            tokenizer=tokenizer,
            hf_model=hf_model,
            **options,
        )

    def enable_compatibility_mode(
        self, disable_warnings: bool = False, no_processing: bool = False, **flags: bool
    ) -> None:
        """Let filters range over the old names alone, and texts begin with a BOS token. Weights stay as they are."""
        self.compatibility_mode = True
        self.default_prepend_bos = True
        asked = [name for name, value in flags.items() if value]
        if asked and not disable_warnings and not no_processing:
            _beware_of_processing(asked)

    def _filter(self, wanted: Any) -> Any:
        """Callables see both names of a site; the one they accept is the one it is kept by."""
        if self.compatibility_mode or not callable(wanted) or isinstance(wanted, nn.Module):
            return wanted
        found = []
        for name in self.tree.table.sites:
            others = [other for other in names.bridge_names(name) if self._has_part(other)]
            found += (
                [next(n for n in (name, *others) if wanted(n))]
                if any(map(wanted, (name, *others)))
                else []
            )
        return found or wanted

    def _has_part(self, bridge_name: str) -> bool:
        """Whether this model has the part that one of the bridge's names is of: a norm after a branch, a gate."""
        part = bridge_name.rpartition(".")[0]
        if part.endswith("_post"):
            return f"{part}.hook_normalized" in self.tree.table.sites
        gated = f"{part.rpartition('.')[0]}.hook_pre_linear" in self.tree.table.sites
        return gated if part.endswith("mlp.gate") else True

    def get_hook_point(self, name: str) -> Any:
        """The hook point of a name."""
        return self.hook_dict[name]

    def block_hooks(self, layer_idx: int) -> list[str]:
        """The hook points of a block, by their names in it."""
        start = f"blocks.{layer_idx}."
        return [name[len(start) :] for name in self.hook_dict if name.startswith(start)]

    def block_submodules(self, layer_idx: int) -> list[str]:
        """The parts of a block: ``attn``, ``mlp``, ``ln1``, ..."""
        return sorted({name.split(".")[0] for name in self.block_hooks(layer_idx) if "." in name})

    def layer_types(self) -> list[str]:
        """What each block is made of, such as ``attn+mlp``."""
        parts = (self.block_submodules(layer) for layer in range(len(self.blocks)))
        return ["+".join(p for p in found if not p.startswith("ln")) for found in parts]

    def blocks_with(self, submodule: str) -> list[tuple[int, Any]]:
        """The blocks that have a part, each with its number."""
        layers = range(len(self.blocks))
        return [(n, self.blocks[n]) for n in layers if submodule in self.block_submodules(n)]

    def stack_params_for(
        self, submodule: str, attr_path: str, reshape_fn: Any = None
    ) -> tuple[list[int], Tensor]:
        """One weight of every block that has the part, stacked, and the numbers of those blocks."""
        layers, found = [], []
        for number, block in self.blocks_with(submodule):
            weight = torch.as_tensor(getattr(getattr(block, submodule), attr_path))
            layers.append(number)
            found.append(weight if reshape_fn is None else reshape_fn(weight))
        return layers, torch.stack(found)


class HookedEncoder(HookedTransformer):
    """An encoder such as BERT; ``return_type="predictions"`` names the likeliest word at each mask."""

    _prepends_bos = None

    def __call__(self, input: Any = None, *, return_type: Any = "logits", **kwargs: Any) -> Any:
        """Run the encoder: logits of the masked-language head, or its words for the masks."""
        if return_type != "predictions":
            return super().__call__(input, return_type=return_type, **kwargs)
        logits = super().__call__(input, return_type="logits", **kwargs)
        return predictions(self, self.prepare(input)["input_ids"], logits)

    predict_next_sentence = predict_next_sentence


class HookedEncoderDecoder(HookedTransformer):
    """An encoder-decoder such as T5: ``model(text, decoder_input=tokens)``."""

    _prepends_bos = None

    def __call__(self, input: Any = None, decoder_input: Any = None, **kwargs: Any) -> Any:
        """Run encoder and decoder."""
        if decoder_input is not None:
            kwargs["decoder_input_ids"] = self._tokens(decoder_input)
        return super().__call__(input, **kwargs)


def _on_hub(name: str) -> str:
    """A name as a hub knows it."""
    name = _NICKNAMES.get(name, name)
    for start, organisation in _ORGANISATIONS.items():
        if name.startswith(start) and "/" not in name:
            return f"{organisation}/{name}"
    return name


def _beware_of_processing(asked: list[str]) -> None:
    if asked:
        warnings.warn(
            f"{', '.join(asked)}: weights stay as the model has them. ActivationCache and logit_attrs take norms "
            "into account, so their sums are right; W_* are those of the unprocessed model.",
            stacklevel=3,
        )


__all__ = [
    "HookedEncoder",
    "HookedEncoderDecoder",
    "HookedTransformer",
    "HookedTransformerConfig",
    "TransformerBridge",
]
