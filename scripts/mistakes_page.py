"""Writes docs/mistakes.md: mistakes that people make, each with the error it gives.

python -m scripts.mistakes_page

Every line is run; a test compares the page with what comes out, so the page says what really happens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parent.parent / "docs" / "mistakes.md"
HEAD = """# Mistakes

What people get wrong, and what interpose says to it. Written by `python -m scripts.mistakes_page`, which makes each
mistake; a test makes them again. Each was made after these lines:

```python
import torch
from torch import nn
import interpose as ip

net = nn.Sequential()
net.add_module("fc1", nn.Linear(4, 8))
net.add_module("act", nn.ReLU())
net.add_module("fc2", nn.Linear(8, 3))
plain, x = ip.wrap(net), torch.randn(2, 4)  # any network
model = ip.load("pocket")  # a language model
text, other = "The Eiffel Tower is in", "The Trevi Fountain is in"
_, cache = model.run_with_cache(text)
tokens = model.to_tokens(text)
```
"""

MISTAKES: dict[str, str] = {
    "Names of interpose": """
        ip.zeros("z", layer=3)
        ip.Sweep(model, text, other)
        ip.logit_diff(" Paris", " Rome")
        ip.metrics.logit_diff(" Paris", " Rome")
        ip.hook_points
        ip.run_with_cache(model, text)
        model.run_with_cahce(text)
        model.sweep(text, other)
        plain.generate("Hello")
    """,
    "Words of arguments": """
        ip.zero("z", layer=3, heads=5)
        ip.zero("z", Layer=3)
        ip.zero("z", position=2)
        ip.zero()
        ip.scale("fc1")
        ip.sweep(model, text, corrupted=other)
        ip.ablation(model, [text], sites="z")
        ip.logit_lens(model, text, topk=3)
        ip.metrics.logit(" Paris", position=-1)
        ip.clip_grad("fc1", norm=1.0)
        ip.Statistics(axis=1)
        model.run_with_cache(text, name_filter="resid_post")
        model.run_with_hooks(text, fwd_hook=[("resid_post", print)])
        model(text, return_typ="loss")
        model(text, return_type="logit")
    """,
    "Wrapping and loading": """
        ip.wrap("pocket")
        ip.wrap(nn.Linear)
        ip.wrap(plain)
        ip.wrap({"fc1": nn.Linear(4, 4)})
        ip.wrap(net, tokenizer=model.tokenizer)
        ip.load("pokcet")
        ip.load("./no_such_folder")
        ip.load(net)
    """,
    "Sites": """
        model.run_with_hooks(text, fwd_hooks=[("blocks.3.attn.hook_zz", print)])
        model.run_with_cache(text, names_filter="blocks.9.hook_resid_post")
        model.run_with_cache(text, names_filter=("resid_pots", 3))
        model.run_with_cache(text, names_filter=("Resid_Post", 3))
        model.run_with_hooks(text, fwd_hooks=[("resid_post", 3, print)])
        model.run_with_cache(text, names_filter="blocks.*.hook_reisd")
        model.run_with_cache(text, names_filter=lambda name: "foo" in name)
        model.run_with_cache(text, names_filter=[])
        model.run_with_cache(text, names_filter=nn.Conv2d)
        model.run_with_cache(text, names_filter=3)
        plain.run_with_cache(x, names_filter="fc3")
        plain.run_with_cache(x, names_filter="FC1")
        plain.run_with_cache(x, names_filter="fc1.weight")
        plain.run_with_cache(x, names_filter="resid_mid")
        plain.run_with_cache(x, names_filter=("resid_post", 3))
        plain.run_with_cache(x, names_filter="blocks.0.hook_resid_post")
    """,
    "Caches": """
        cache["resid_pots", 3]
        cache["resid_post", 12]
        cache["resid_post"]
        cache["Resid_Post", 3]
        cache["result", 3]
        cache["blocks.3.hook_resid_pots"]
        cache["z", 3, 5]
        cache[3]
        cache["resid_post", 3, "grad"]
        cache.grad["resid_post", 3]
        plain.run_with_cache(x)[1]["fc3"]
        plain.run_with_cache(x, names_filter="fc1")[1]["fc2"]
    """,
    "Hooks": """
        model.run_with_hooks(text, fwd_hooks=[("z", 3)])
        model.run_with_hooks(text, fwd_hooks=["resid_post"])
        model.run_with_hooks(text, fwd_hooks="resid_post")
        plain.run_with_hooks(x, fwd_hooks=[("fc1", lambda value, hook: value[:, :4])])
        plain.run_with_hooks(x, fwd_hooks=[("fc1", lambda value, hook: value > 0)])
        plain.run_with_hooks(x, fwd_hooks=[("fc1", lambda value, hook: (value,))])
        plain.run_with_hooks(x, fwd_hooks=[("fc1", lambda module, args, output: output)])
        plain.run_with_hooks(x, bwd_hooks=[("fc1", lambda module, given, made: None)])
        plain.run_with_hooks(x, bwd_hooks=[("fc1", ip.torch_hook(lambda m, gi, go: None))])
        plain.run_with_cache(x, incl_bwd=True)
        plain.add_hook("fc1", print, dir="backward")
    """,
    "Edits": """
        plain.run_with_hooks(x, hooks=[ip.zero("fc1", layer=3)])
        model.run_with_hooks(text, hooks=[ip.zero("z", layer=8)])
        model.run_with_hooks(text, hooks=[ip.zero("z", layer=3, head=9)])
        model.run_with_hooks(text, hooks=[ip.zero("resid_post", layer=3, head=1)])
        model.run_with_hooks(text, hooks=[ip.zero("resid_post", layer=3, pos=40)])
        model.run_with_hooks(text, hooks=[ip.zero("resid_post", layer=3, pos=" Rome")])
        model.run_with_hooks(text, hooks=[ip.zero("resid_post", layer="3")])
        model.run_with_hooks(text, hooks=[ip.add("resid_post", torch.ones(7), layer=3)])
        model.run_with_hooks(text, hooks=[ip.patch("resid_post", cache, layer=3, pos=9)])
        model.run_with_hooks(text, hooks=[ip.patch("resid_post", {}, layer=3)])
        model.run_with_hooks(text, hooks=ip.zero)
        model.run_with_hooks(text, hooks=[ip.zero])
        plain.run_with_hooks(x, hooks=[ip.zero("fc1", head=1)])
        plain.run_with_hooks(x, hooks=[ip.zero("resid_mid", layer=1)])
    """,
    "Steering": """
        ip.steering_vector(model, [text], [text], layer=3)
        ip.steering_vector(model, [text], [other], by="mean")
        ip.SteeringVector.of(torch.ones(64), layer=3).must_be_of(model)
        ip.SteeringVector.of(torch.ones(192), layer=3, model_type="llama").must_be_of(model)
        ip.SteeringVector.of(torch.ones(192), layer=3).add(layers=3)
        ip.SteeringVector.of(torch.ones(192), layer=0).save("x.gguf")
        ip.add("resid_post", 1.0, layer=3, when=cache["resid_post", 3])
        ip.when(torch.ones(192), site="resid_post", layer=3)
        model.run_with_hooks(text, hooks=[ip.zero(("z", 3), when=ip.when(neuron=0, above=0, site=("mlp_out", 3)))])
        ip.written(model, ip.add("resid_post", torch.ones(192), layer=3, pos=-1))
        ip.written(model, ip.project_out("resid_post", torch.ones(192), layer=3))
        ip.side_by_side(model, text, ip.zero("z", layer=3, pos=50), max_new_tokens=2)
    """,
    "Inputs": """
        model("")
        model([])
        model(torch.tensor([[1.0, 2.0]]))
        model(torch.tensor([[3, 999999]]))
        model(torch.tensor([[3, -1]]))
        model([[1.5, 2.0]])
        model(torch.ones(1, 300, dtype=torch.long))
        model(torch.zeros(1, 2, 3, dtype=torch.long))
        model(tokens, start_at_layer=2)
        plain(torch.randn(2, 5))
        plain.run_with_cache(torch.randn(2, 5))
        plain(torch.ones(2, 4, dtype=torch.long))
        model.to_single_token(" Eiffel Tower")
        model.to_tokens(3)
    """,
    "Methods": """
        ip.logit_lens(plain, text)
        ip.sweep(plain, text, other, over="layer", metric=ip.metrics.logit(" Paris"))
        ip.head_scores(plain)
        plain.check()
        ip.ablation(net, [text])
        ip.sweep(model, text, other, over="layers", metric=ip.metrics.logit(" Paris"))
        ip.sweep(model, text, other, over="layer", metric="logit")
        ip.sweep(model, text, "Rome", over="layer", metric=ip.metrics.logit(" Paris"))
        ip.sweep(model, text, other, over="layer", metric=ip.metrics.logit("Paris"))
        ip.sweep(model, text, other, over="layer", metric=ip.metrics.logit(" Eiffel Tower"))
        ip.measure(model, [[3]], ip.metrics.loss())
        ip.logit_lens(model, text, layer=9)
        ip.logit_lens(model, text, answer="Paris")
        ip.sweep(model.train(), text, other, over="layer", metric=ip.metrics.logit(" Paris"))
    """,
    "Files": """
        ip.SAE.from_pretrained("no_such_folder")
        ip.open_store("no_such_folder")
        ip.load_edits("no_such_folder")
        ip.load_collected("no_such_folder")
        ip.load_result("no_such_file.json")
        ip.Experiment.load("no_such_file.json")
        ip.logit_lens(model, text, progress=False).save("lens.doc")
        ip.save_edits("folder", "z")
    """,
}


def setting() -> dict[str, Any]:
    """What the code block at the head of the page makes."""
    code = HEAD.split("```python\n")[1].split("```")[0]
    there: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code, there)
    return there


def said(code: str, there: dict[str, Any]) -> str:
    """The error that a line gives, with its notes."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(code, "page", "exec"), dict(there))
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return "\n".join([f"{type(error).__name__}: {error}", *notes])
    finally:
        there["model"].eval()
    raise AssertionError(f"no error: {code}")


def mistakes() -> dict[str, list[tuple[str, str]]]:
    """Each mistake with what it gives, by section."""
    there = setting()
    return {
        section: [(line.strip(), said(line.strip(), there)) for line in lines.strip().splitlines()]
        for section, lines in MISTAKES.items()
    }


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, found in mistakes().items():
        rows = [f"| {_cell(code)} | {_cell(text)} |" for code, text in found]
        parts.append(
            "\n".join([f"## {section}", "", "| mistake | message |", "|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def _cell(text: str) -> str:
    lines = [line.strip() for line in text.replace("|", "\\|").split("\n") if line.strip()]
    return "<br>".join(f"`` {line} ``" if "`" in line else f"`{line}`" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
