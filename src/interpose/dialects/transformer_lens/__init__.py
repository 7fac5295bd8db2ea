"""TransformerLens's names. Change the import line, keep the code.

```python
from interpose.dialects.transformer_lens import HookedTransformer, utils
```
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interpose.dialects.transformer_lens.cache import (
        TransformerLensKeyValueCache,
        TransformerLensKeyValueCacheEntry,
    )
    from interpose.dialects.transformer_lens.cache.activation_cache import ActivationCache
    from interpose.dialects.transformer_lens.factored_matrix import FactoredMatrix
    from interpose.dialects.transformer_lens.hook_points import HookPoint
    from interpose.dialects.transformer_lens.hooked_transformer import (
        HookedEncoder,
        HookedEncoderDecoder,
        HookedTransformer,
        HookedTransformerConfig,
        TransformerBridge,
    )
    from interpose.dialects.transformer_lens.hooks.hooked_root_module import HookedRootModule
    from interpose.dialects.transformer_lens.next_sentence import BertNextSentencePrediction
    from interpose.dialects.transformer_lens.past_key_value_caching import (
        HookedTransformerKeyValueCache,
        HookedTransformerKeyValueCacheEntry,
    )
    from interpose.dialects.transformer_lens.svd_interpreter import SVDInterpreter

_HERE = "interpose.dialects.transformer_lens"
_HOME_OF = {
    "ActivationCache": "cache.activation_cache",
    "BertNextSentencePrediction": "next_sentence",
    "FactoredMatrix": "factored_matrix",
    "HookPoint": "hook_points",
    "HookedEncoder": "hooked_transformer",
    "HookedEncoderDecoder": "hooked_transformer",
    "HookedRootModule": "hooks.hooked_root_module",
    "HookedTransformer": "hooked_transformer",
    "HookedTransformerConfig": "hooked_transformer",
    "HookedTransformerKeyValueCache": "past_key_value_caching",
    "HookedTransformerKeyValueCacheEntry": "past_key_value_caching",
    "SVDInterpreter": "svd_interpreter",
    "TransformerBridge": "hooked_transformer",
    "TransformerLensKeyValueCache": "cache",
    "TransformerLensKeyValueCacheEntry": "cache",
}
_MODULES = (
    "cache",
    "evals",
    "head_detector",
    "hook_points",
    "loading",
    "patching",
    "train",
    "utilities",
    "utils",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{_HERE}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"interpose.dialects.transformer_lens has no {name!r}")
    found = getattr(importlib.import_module(f"{_HERE}.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


class _Package(types.ModuleType):
    """Keeps classes where modules have their names: ``transformer_lens.ActivationCache`` is the class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ActivationCache",
    "BertNextSentencePrediction",
    "FactoredMatrix",
    "HookPoint",
    "HookedEncoder",
    "HookedEncoderDecoder",
    "HookedRootModule",
    "HookedTransformer",
    "HookedTransformerConfig",
    "HookedTransformerKeyValueCache",
    "HookedTransformerKeyValueCacheEntry",
    "SVDInterpreter",
    "TransformerBridge",
    "TransformerLensKeyValueCache",
    "TransformerLensKeyValueCacheEntry",
    "cache",
    "evals",
    "head_detector",
    "hook_points",
    "loading",
    "patching",
    "train",
    "utilities",
    "utils",
]
