"""`ip.relp`: the same forward pass with a backward pass that is more honest about large changes (RelP).

A gradient says what an endless small change would do. Patching makes a large one, and some parts of a model answer
large changes quite differently: a norm divides by the very change, an activation saturates. RelP holds such parts
still, by the rules of layer-wise relevance propagation, so that what is left is closer to linear:

    norm         y = w * x / scale + b       the scale counts as a constant
    activation   y = f(x)                    as if y = x * (f(x) / x), with the quotient a constant
    gate         y = a * b                   a gradient of half to each factor
    attention    z = pattern @ v             the pattern counts as a constant

Every value of the forward pass stays the same, bit for bit; only gradients differ.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import interpose as ip
from interpose.precision import wide

RULES = ("norm", "activation", "gate", "attention")


class Linearised(list[Any]):
    """Hooks for ``model.hooks`` or ``run_with_hooks``.

    Attributes:
        rules: how many places each rule has.
        left: what keeps its true gradient though a rule was asked for, with the reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[str, int] = {}
        self.left: list[str] = []

    def put(self, rule: str, *hooks: tuple[str, Any]) -> None:
        """Add the hooks of one place."""
        self.extend(hooks)
        self.rules[rule] = self.rules.get(rule, 0) + 1


def relp(
    model: ip.TransformerModel, *, rules: str | Sequence[str] = ("norm", "activation", "gate")
) -> Linearised:
    """Hooks under which the backward pass follows the rules of RelP, and the forward pass is as ever.

    ```python
    _, cache = model.run_with_cache(text, names_filter="mlp_out", hooks=ip.relp(model), incl_bwd=lead)
    cache.grad["mlp_out", 3]
    ```

    Without the rule for attention by default: with it, what a head's query or key does is lost, and estimates agree
    with patching less well on average. The paper's own set is ``rules=("norm", "activation", "gate", "attention")``.

    A mixture of experts, a state space, norms of another formula and norms inside attention keep their true
    gradients; ``.left`` says so.
    At ``pre`` and ``pre_linear`` there is no gradient under the rule for activations; ask at ``post``.

    Args:
        model: a model of transformers, or one from scratch.
        rules: which, of ``norm``, ``activation``, ``gate`` and ``attention``.
    """
    chosen = (rules,) if isinstance(rules, str) else tuple(rules)
    if unknown := set(chosen) - set(RULES):
        raise ValueError(f"no rule {sorted(unknown)[0]!r}. The rules are: {', '.join(RULES)}.")
    if not isinstance(model, ip.TransformerModel):
        raise ip.Unsupported(
            f"relp finds norms, activations and attention by their sites; {type(model).__name__} has module names "
            "only. Wrap a model of transformers, or write hooks of your own with a gradient of their own."
        )
    found = Linearised()
    names = dict.fromkeys(model.hook_dict)  # in order, and quick to look up
    for name in names:
        at, _, kind = name.rpartition("hook_")
        if kind == "normalized" and "norm" in chosen:
            _norm(model, found, at, names)
        elif kind == "post" and {"activation", "gate"} & set(chosen):
            _mlp(found, f"{at}hook_", names, chosen)
        elif kind == "q" and "attention" in chosen:
            both = (name, f"{at}hook_k")
            found.put("attention", *((each, _detached) for each in both if each in names))
    found.left += _left(model, names, chosen)
    return found


# Norms.


def _norm(model: ip.TransformerModel, found: Linearised, at: str, names: Any) -> None:
    name, scale = f"{at}hook_normalized", f"{at}hook_scale"
    if scale not in names:
        found.left.append(f"{name}: {model.sites.absent.get(scale, 'its scale is not known')}")
        return
    norm = model.hook_dict[name].module
    if model.hook_dict[scale].module is not norm:
        found.put("norm", (scale, _detached))  # from scratch: the scale itself passes here
        return
    formula = model.stream.norm(at[:-1])

    def held(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:  # noqa: ARG001
        x = args[0] if args else next(iter(kwargs.values()))
        made: Tensor = _HeldNorm.apply(output.detach(), x, formula)  # type: ignore[no-untyped-call]
        return made

    found.put("norm", (name, ip.torch_hook(held)))


class _HeldNorm(torch.autograd.Function):
    """A norm's output as it is; its gradient with the scale as a constant."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, norm: ip.Formula) -> Tensor:
        # y = factor * x / scale + summand: the scale is how much longer the one side is than the other.
        core = norm.through(wide(x))
        size = (wide(y) - norm.summand).norm(dim=-1, keepdim=True) / core.norm(
            dim=-1, keepdim=True
        ).clamp_min(1e-30)
        ctx.save_for_backward(size)
        ctx.norm = norm
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (size,) = ctx.saved_tensors
        return None, (ctx.norm.before(wide(grad)) * size).to(grad.dtype), None


# MLPs.


class _Along(torch.autograd.Function):
    """One value, and the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, path: Tensor) -> Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, grad


def _mlp(found: Linearised, at: str, names: Any, chosen: Sequence[str]) -> None:
    """The rules of one MLP, whose sites begin with ``at``: post = f(pre), or f(pre) * pre_linear."""
    if f"{at}pre" not in names:
        found.left.append(f"{at}post: no site is there before its activation")
        return
    gated = f"{at}pre_linear" in names
    share = 0.5 if gated and "gate" in chosen else 1.0
    if share < 1:
        found.put("gate")
    sources = [f"{at}pre", f"{at}pre_linear"] if gated else [f"{at}pre"]
    kept: dict[Any, Tensor] = {}  # by thread: two may run the model at once

    def keep(value: Tensor, hook: Any) -> None:
        kept[threading.get_ident(), hook.name] = value

    def along(post: Tensor) -> Tensor:
        path: Any = 0.0
        for name in sources:
            x = kept.pop((threading.get_ident(), name))
            slope = torch.where(x == 0, 0.0, post / x).detach()
            path = path + share * slope * x
        made: Tensor = _Along.apply(post.detach(), path)  # type: ignore[no-untyped-call]
        return made

    def halved(post: Tensor) -> Tensor:
        made: Tensor = _Along.apply(post.detach(), share * post)  # type: ignore[no-untyped-call]
        return made

    if "activation" in chosen:
        found.put("activation", *((name, keep) for name in sources), (f"{at}post", along))
    elif gated:
        found.append((f"{at}post", halved))


def _detached(value: Tensor) -> Tensor:
    return value.detach()


def _left(model: ip.TransformerModel, names: Any, chosen: Sequence[str]) -> list[str]:
    """What the rules do not reach, with the reason."""
    kinds = {"mlp.hook_post": {"activation", "gate"}, "attn.hook_q": {"attention"}}
    reasons = [
        f"{name}: {why}"
        for name, why in model.sites.absent.items()
        for kind, rules in kinds.items()
        if name.endswith(kind) and rules & set(chosen) and why != "this block has no attention"
    ]
    reasons += [f"{name}: no rule for a mixer" for name in names if name.endswith("mixer_out")]
    return reasons + (_norms_without_sites(model, names) if "norm" in chosen else [])


def _norms_without_sites(model: ip.TransformerModel, names: Any) -> list[str]:
    """Norms inside blocks that no rule knows of, such as those of queries and keys; each said once for all blocks."""
    known = {id(model.hook_dict[name].module) for name in names if name.endswith("hook_normalized")}
    found: dict[str, None] = {}
    for block in model.blocks:
        for name, part in getattr(block, "module", block).named_modules():
            named = "norm" in type(part).__name__.lower() and not any(part.children())
            if named and id(part) not in known:
                found[f"blocks.*.{name}: a norm without a site"] = None
    return list(found)
