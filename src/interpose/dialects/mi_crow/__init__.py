"""mi-crow's names. Change the import line, keep the code.

```python
from interpose.dialects.mi_crow.language_model import LanguageModel
from interpose.dialects.mi_crow.hooks import Detector, Controller
```
"""
