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
        raise AttributeError(f"interpose has no {name!r}")
    found = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
