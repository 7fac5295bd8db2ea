"""`HookedTransformer` and its kin: TransformerLens's model classes, as views of models of transformers or from scratch.

A loaded model is the one that transformers loads, with its own forward and its own attention kernel. Processed weights
(`fold_ln` and so on) are those of a copy, which still runs that forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from interpose import names
from interpose.dialects.transformer_lens.cache.going_on import run_after
from interpose.dialects.transformer_lens.config import HookedTransformerConfig, LoadedConfig
from interpose.dialects.transformer_lens.hooks.lens_hooks import LensHooks
from interpose.dialects.transformer_lens.lens_processing import LensProcessing
from interpose.dialects.transformer_lens.lens_text import (
    LensText,
    own_tokenizer,
    predictions,
)
from interpose.dialects.transformer_lens.lens_weights import LensWeights
from interpose.dialects.transformer_lens.loading import own_files
from interpose.dialects.transformer_lens.loading.first_layers import first_layers
from interpose.dialects.transformer_lens.loading.nicknames import on_hub, revision
from interpose.dialects.transformer_lens.loading.published import (
    WITHOUT_BOS,
    WITHOUT_BOS_IN_OLD_CLASSES,
    as_trained,
    prepends_bos,
)
from interpose.dialects.transformer_lens.next_sentence import predict_next_sentence
from interpose.dialects.transformer_lens.scratch.model import build, read, saved
from interpose.dialects.transformer_lens.scratch.processing import STEPS
from interpose.dialects.transformer_lens.scratch.transformer import Transformer
from interpose.errors import Unsupported
from interpose.models import loading
from interpose.models.transformer import TransformerModel


class HookedTransformer(LensProcessing, LensHooks, LensText, LensWeights):
    """A model of transformers, under the names of TransformerLens's `HookedTransformer`.

    ```python
    model = HookedTransformer.from_pretrained("gpt2-small")
    logits, cache = model.run_with_cache("The cat sat on the")
    cache["pattern", 5], model.blocks[5].attn.W_Q, model.W_O[5, 2], model.cfg.n_layers

    small = HookedTransformer(HookedTransformerConfig(
        n_layers=2, d_model=64, d_head=16, n_ctx=32, d_vocab=100, attn_only=True))
    small(tokens, return_type="loss").backward()
    ```

    Args:
        cfg: a config (or its fields) to build a new model from; or a model of transformers to look into.
        tokenizer: for text; by default that of the config's ``tokenizer_name``.
        move_to_device: whether a new model goes to the config's device.
        default_padding_side: where shorter texts of a batch are padded; by default where the tokenizer does.
        processor: for text with images or sound.
    """

    _without_bos: frozenset[str] | None = WITHOUT_BOS_IN_OLD_CLASSES
    _processes = True
    """Whether weights are processed where nobody says otherwise."""

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any] | nn.Module,
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
        *,
        processor: Any = None,
    ) -> None:
        if isinstance(cfg, str):
            raise TypeError("to load a model by name: HookedTransformer.from_pretrained(name).")
        module = cfg
        if isinstance(cfg, (HookedTransformerConfig, dict)):
            module, tokenizer = build(cfg, tokenizer, move_to_device)
        tokenizer = own_tokenizer(tokenizer, default_padding_side)
        super().__init__(module, tokenizer=tokenizer, processor=processor)  # type: ignore[arg-type]
        self._padding_side = default_padding_side
        if self._without_bos is not None:
            self._prepends_bos = prepends_bos(module, self._without_bos)
        if isinstance(module, Transformer):
            self._lens_cfg = module.cfg

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(type(self), processor=self.processor)
        state = {"_prepends_bos": self.default_prepend_bos}
        return made, (self.module, self.tokenizer, True, self.default_padding_side), state

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        refactor_factored_attn_matrices: bool | None = False,
        hf_model: nn.Module | None = None,
        device: str | torch.device | None = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        fold_value_biases: bool | None = None,
        default_prepend_bos: bool | None = None,
        default_padding_side: str | None = None,
        dtype: torch.dtype | str | None = torch.float32,
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        move_to_device: bool = True,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        **options: Any,
    ) -> Self:
        """Load a model by name (TransformerLens's nicknames too) or folder, or look into one that is loaded.

        Weights are processed as in TransformerLens, but not those of a model from scratch that `save_pretrained` saved.

        Args:
            model_name: ``gpt2-small``, ``EleutherAI/pythia-70m``, a folder, or ``pocket``.
            fold_ln: what norms multiply with and add goes into the weights that read them. By default where that is
                exact on this model; True insists, and is refused with the reason where it is not.
            center_writing_weights: whatever writes to the stream writes with mean zero; as ``fold_ln``.
            center_unembed: logits have mean zero over the vocabulary; as ``fold_ln``.
            refactor_factored_attn_matrices: each head's factors become those of a singular value decomposition.
            hf_model: a loaded model to look into; it stays as it is, since weights are processed on a copy.
            device: where to put it.
            n_devices: more than one spreads the layers (transformers' ``device_map="auto"``).
            tokenizer: instead of the model's own.
            fold_value_biases: the biases of values go into those of outputs; as ``fold_ln``.
            default_prepend_bos: whether texts begin with a BOS token unless said otherwise; by default they do, but
                those of GPT-NeoX, BLOOM, Qwen and Phi.
            default_padding_side: where shorter texts of a batch are padded; by default where the tokenizer does.
            dtype: of the weights.
            first_n_layers: leave all later layers out; a copy of ``hf_model`` loses them.
            n_ctx: the longest text, if shorter than what the model has positions for.
            move_to_device: False leaves the model on the CPU.
            checkpoint_index: the how-manieth checkpoint of training, of Pythia and Stanford's GPT-2.
            checkpoint_value: or the step that it was saved at.
            **options: for transformers' ``from_pretrained``.
        """
        flags: dict[str, bool | None] = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
            "fold_value_biases": fold_value_biases,
        }
        if n_devices > 1:
            options["device_map"] = "auto"
        if not cls._processes:
            flags = {flag: bool(value) for flag, value in flags.items()}
        processor, name = None, on_hub(model_name)
        step = revision(name, checkpoint_index, checkpoint_value)
        options |= {} if step is None else {"revision": step}
        device = device if move_to_device else "cpu"
        if hf_model is None and saved(model_name):
            flags = {flag: bool(value) for flag, value in flags.items()}  # as it was trained
            module: nn.Module = read(model_name, device, dtype)
            found = loading.tokenizer_of(model_name)
        elif hf_model is None:
            own_files.must_be_here(model_name)
            loaded = cls._loaded(name, device=device, dtype=dtype, **options)
            module, found, processor = loaded.module, loaded.tokenizer, loaded.processor
        else:
            module = hf_model if device is None else hf_model.to(device)
            found = loading.tokenizer_of(name) if tokenizer is None else None
        if first_n_layers is not None:
            module = first_layers(module, first_n_layers, copy=hf_model is not None)
        model = cls(
            module,
            tokenizer=found if tokenizer is None else tokenizer,
            default_padding_side=default_padding_side,
            processor=processor,
        )
        if default_prepend_bos is not None:
            model.default_prepend_bos = default_prepend_bos
        if n_ctx is not None:
            model.shorten(n_ctx)
        if any(value is not False for value in flags.values()):
            model.process_weights_(**flags, copy=hf_model is not None and module is hf_model)
        return model

    @classmethod
    def _loaded(cls, name: str, **options: Any) -> TransformerModel:
        """A model of transformers by its name."""
        return loading.load(name, **options)

    @classmethod
    def from_pretrained_no_processing(cls, model_name: str, **options: Any) -> Self:
        """Load a model, or look into one, with its weights as they are."""
        return cls.from_pretrained(model_name, **{**_UNPROCESSED, **options})

    @property
    def cfg(self) -> HookedTransformerConfig:  # type: ignore[override]
        """What the model is like, and its flags."""
        found = vars(self).get("_lens_cfg")
        if found is None:
            found = LoadedConfig(self, default_prepend_bos=self.default_prepend_bos)
            self._lens_cfg = found
        return found

    def __call__(self, input: Any = None, *second: Any, **kwargs: Any) -> Any:
        """Run the model; further arguments are the ``return_type`` and so on, ``tokens`` those of a residual.

        With ``past_kv_cache`` it goes on from what is in a `TransformerLensKeyValueCache`.
        """
        kwargs |= zip(("return_type", "loss_per_token", "prepend_bos", "padding_side"), second)
        if "tokens" in kwargs:
            kwargs["input_ids"] = kwargs.pop("tokens")
        kwargs.pop("shortformer_pos_embed", None)  # found from the positions
        past = kwargs.pop("past_kv_cache", None)
        if past is not None:
            return run_after(self, past, super().__call__, input, **kwargs)
        kwargs |= self._positions_around_holes(kwargs)
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

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Show keys and values once for every head, where heads share them; models from scratch alone do."""
        if ungroup_grouped_query_attention and not self.is_from_scratch:
            raise Unsupported(
                "hook_k and hook_v have as many heads as the module's own keys and values."
            )
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    def set_tokenizer(self, tokenizer: Any, default_padding_side: str | None = None) -> None:
        """Read and write text with another tokenizer."""
        self.tokenizer = own_tokenizer(tokenizer, default_padding_side)
        self._padding_side = default_padding_side

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Make ``hook_mlp_in`` part of everything."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in


_UNPROCESSED = dict.fromkeys(STEPS, False)


class TransformerBridge(HookedTransformer):
    """The same as TransformerLens's newer class: filters also see its names, such as ``blocks.0.attn.o.hook_in``.

    Whether texts begin with a BOS token depends on the type of model, as it does there.
    """

    compatibility_mode = False
    _without_bos = WITHOUT_BOS
    _masked_is_infinite = False
    _as_transformers = True

    @property
    def all_head_labels(self) -> list[str]:  # type: ignore[override]
        """A label for every head, in order; a method of the old classes."""
        return super().all_head_labels()

    @property
    def original_model(self) -> nn.Module:
        """The model of transformers."""
        return self.module

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
        return cls.from_pretrained_no_processing(
            model_name,
            device=device,
            dtype=dtype,
            tokenizer=tokenizer,
            hf_model=hf_model,
            **options,
        )

    @classmethod
    def boot_native(
        cls,
        config: HookedTransformerConfig | dict[str, Any],
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A new model from a config: ``HookedTransformer(config)``."""
        cfg = HookedTransformerConfig.unwrap(config)
        wanted = replace(cfg, device=device or cfg.device, dtype=dtype or cfg.dtype)
        return cls(wanted, tokenizer)

    def enable_compatibility_mode(
        self, disable_warnings: bool = False, no_processing: bool = False, **flags: bool
    ) -> None:
        """Let filters range over the old names alone, texts begin with a BOS token, and process the weights.

        Args:
            disable_warnings: accepted; there are none.
            no_processing: leave the weights as they are.
            **flags: as in `process_weights_`.
        """
        del disable_warnings
        self.compatibility_mode = True
        self.default_prepend_bos = True
        if not no_processing:
            self.process_weights_(**flags)
        self.compatibility_mode = True

    def _ranging(self, wanted: Any, over: Callable[[str], bool]) -> Any:
        """Callables see both names of a site; the one they accept is the one it is kept by."""
        if self.compatibility_mode or not callable(wanted) or isinstance(wanted, nn.Module):
            return super()._ranging(wanted, over)
        found = {name: self._accepted(name, wanted) for name in self.tree.table.sites}
        chosen = [asked for name, asked in found.items() if asked is not None and over(name)]
        return chosen or [asked for asked in found.values() if asked is not None] or wanted

    def _accepted(self, name: str, wanted: Callable[[str], bool]) -> str | None:
        """The first of a site's names that a callable accepts."""
        others = [other for other in names.bridge_names(name) if self._has_part(other)]
        return next((each for each in (name, *others) if wanted(each)), None)

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

    _without_bos = None
    _processes = False

    @classmethod
    def _loaded(cls, name: str, **options: Any) -> TransformerModel:
        """A BERT with both its heads, of which its config names one."""
        return loading.load(name, **options, **as_trained(name, options))

    def __call__(self, input: Any = None, *, return_type: Any = "logits", **kwargs: Any) -> Any:
        """Run the encoder: logits of the head for masked words, or words for the masks; of a mapping, all it gives."""
        if isinstance(input, Mapping) and return_type == "logits":
            return super().__call__(input, **kwargs)
        if return_type != "predictions":
            return super().__call__(input, return_type=return_type, **kwargs)
        logits = super().__call__(input, return_type="logits", **kwargs)
        return predictions(self, self.prepare(input)["input_ids"], logits)

    predict_next_sentence = predict_next_sentence


class HookedEncoderDecoder(HookedTransformer):
    """An encoder-decoder such as T5: ``model(text, decoder_input=tokens)``."""

    _without_bos = None
    _processes = False

    def __call__(self, input: Any = None, decoder_input: Any = None, **kwargs: Any) -> Any:
        """Run encoder and decoder."""
        if decoder_input is not None:
            kwargs["decoder_input_ids"] = self._tokens(decoder_input)
        return super().__call__(input, **kwargs)


__all__ = [
    "HookedEncoder",
    "HookedEncoderDecoder",
    "HookedTransformer",
    "HookedTransformerConfig",
    "TransformerBridge",
]
