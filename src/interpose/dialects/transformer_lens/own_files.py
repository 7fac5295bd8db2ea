"""Models whose weights are files of TransformerLens's own, which transformers does not read."""

from __future__ import annotations

from pathlib import Path

from interpose.dialects.transformer_lens.nicknames import own_file
from interpose.errors import Unsupported


def must_be_here(name: str) -> None:
    """Refuse a name whose weights only a file of TransformerLens's own has, and say how to read that."""
    repository = own_file(name)
    if repository is None or Path(name).expanduser().exists():
        return
    raise Unsupported(
        f"the weights of {name!r} are a file of TransformerLens's own, and no model of transformers.\n"
        f"  Download it from the repository {repository!r} (config.json, and the file that ends in .pth), then:\n"
        "  model = HookedTransformer(HookedTransformerConfig(...))   # with the sizes in config.json\n"
        "  model.load_state_dict(torch.load(FILE)); model.save_pretrained(FOLDER)\n"
        "  HookedTransformer.from_pretrained(FOLDER)                 # from then on"
    )
