"""Why a hook never ran, where its scope ends."""

from __future__ import annotations

from typing import Any


def explain_silence(scope: Any, label: str, silent: Any) -> str:
    """The text of `NeverFired`.

    Args:
        scope: the scope that ends.
        label: what errors call the hook.
        silent: its listener that never ran.
    """
    site, missed, calls = silent.site, silent.missed, silent.most_calls
    what = f"{label} at {site.name!r} never fired"
    kind = type(site.module).__name__
    if getattr(silent, "idle", ""):
        return f"{what}: {silent.idle}"
    if missed:
        return (
            f"{what}: {kind} was called {missed} times, but outside this scope (in another "
            "thread?).\n"
            "  Threads start with no scope: run ip.in_scope(function) in the thread instead "
            "of function."
        )
    if not scope.forwards and not calls:
        return f"{what}: the model was not called inside the with block."
    if hasattr(silent, "attached") and calls:
        return _without_gradient(scope, what, silent)
    if site.tail.call is not None and calls:
        there = "once: #0" if calls == 1 else f"{calls} times: #0 to #{calls - 1}"
        return f"{what}: {kind} was called {there}."
    return (
        f"{what}: {kind} was not called in {scope.forwards} forward pass(es).\n"
        "  Its branch was not taken, or the model uses it without calling it "
        "(module.forward(x), module.weight).\n"
        "  Hook the module around it instead.   (what fires: model.scan(inputs); model.sites)"
    )


def _without_gradient(scope: Any, what: str, silent: Any) -> str:
    if silent.without_grad:
        return f"{what}: gradients are off here (torch.no_grad or inference_mode). Run it with gradients on."
    if not silent.attached:
        return f"{what}: no floating point value passed there."
    return f"{what}: its value was seen, but no gradient came back.\n" + (
        "  Call backward() inside the with block, on something that depends on this site."
        if not scope.targets
        else "  The loss does not depend on it."
    )
