"""interpose: read, edit, ablate, patch and steer activations and gradients of any PyTorch model, by name."""

__version__ = "0.1.0.dev0"


def _exports() -> dict[str, str]:
    """Each exported name with the module it comes from, as `__init__.pyi` has them for type checkers."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


_HOME_OF = _exports()
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    # Names come with their module when they are first used, so that `interpose --help` needs no torch.
    import importlib

    if name not in _HOME_OF:
        raise AttributeError(_no_such(name))
    from interpose.explain.calls import careful

    found = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = found = careful(found, f"ip.{name}")
    return found


def _no_such(name: str) -> str:
    """What to say about a name that is not exported."""
    import ast
    import sys
    from pathlib import Path

    said = f"interpose has no {name!r}"
    here = Path(__file__).parent
    if name.startswith("__") or (here / name).exists() or (here / f"{name}.py").exists():
        return said  # Python asks before it imports a module by this name
    from interpose.explain.words import hint

    model = sys.modules.get("interpose.models.transformer")
    if model is not None and hasattr(model.TransformerModel, name):
        return f"{said}; it is a method of models: model = ip.load(...), then model.{name}(...)"
    metrics = ast.parse((here / "sweeps" / "metrics.py").read_text("utf-8"))
    classes = (part.name for part in metrics.body if isinstance(part, ast.ClassDef))
    choices = [*__all__, *(f"metrics.{other}" for other in classes if other[0].islower())]
    bare = {choice.removeprefix("metrics."): choice for choice in reversed(choices)}
    near = hint(name, bare, lambda word: f"ip.{bare[word]}")
    return f"{said}{near or '.'} (every name: dir(ip))"


def __dir__() -> list[str]:
    return list(__all__)
