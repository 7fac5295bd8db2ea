"""One of two processes that hold a model together: what it sees of it. Run by `tests/models/test_tensor_parallel.py`.

python -m tests.models.spread_model RANK FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import interpose as ip
from interpose.models.spread import is_spread

TOKENS = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])


def load(folder: Path) -> Any:
    """The model, spread over the processes as its class plans it."""
    import transformers
    from transformers.integrations import accelerate

    # transformers asks for accelerate here, and uses nothing of it.
    accelerate.is_accelerate_available = lambda *_, **__: True
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        options: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):
        options = {"tp_plan": "auto"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **options).eval()


def said(do: Any) -> str:
    """What is raised."""
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    model = ip.wrap(load(folder))
    assert isinstance(model, ip.TransformerModel)
    logits, cache = model.run_with_cache(TOKENS)
    edits = [ip.scale("resid_post", 0.5, layer=0), ip.zero("mlp_out", layer=1)]
    torch.save(
        {
            "spread": is_spread(model.root),
            "partial": sorted(model.partial),
            "cache": {name: cache[name] for name in cache},
            "logits": logits,
            "edited": model.run_with_hooks(TOKENS, hooks=edits),
            "cfg": (model.cfg.n_heads, model.cfg.n_key_value_heads, model.cfg.d_model),
            "refused": {
                "z": said(lambda: model.run_with_cache(TOKENS, names_filter=("z", 1))),
                "path": said(
                    lambda: model.run_with_cache(
                        TOKENS, names_filter="model.layers.0.self_attn.q_proj"
                    )
                ),
                "edit": said(lambda: model.run_with_hooks(TOKENS, hooks=[ip.zero("z", layer=0, head=1)])),
                "weights": said(lambda: model.W_Q),
                "check": said(model.check),
                "harvest": said(
                    lambda: ip.harvest(
                        model, TOKENS, ("resid_post", 0), store=folder / "s", progress=False
                    )
                ),
                "sweep": said(
                    lambda: ip.sweep(
                        model, TOKENS[:1], TOKENS[1:], metric=ip.metrics.logit(3), progress=False
                    )
                ),
            },
        },
        folder / f"{rank}.pt",
    )  # fmt: skip
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
