"""mi-crow's names. Change the import line, keep the code.

```python
from interpose.dialects.mi_crow.language_model import LanguageModel
from interpose.dialects.mi_crow.hooks import Controller, Detector
```
"""

import importlib
from typing import Any

__all__ = ["datasets", "hooks", "language_model", "mechanistic", "store"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"interpose.dialects.mi_crow has no {name!r}; it has {', '.join(__all__)}."
        )
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
