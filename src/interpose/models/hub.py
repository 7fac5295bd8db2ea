"""Whether a model by name is to be had: on the hub, in its cache on this machine, or not at all, told at once.

The hub's library waits and tries again for half a minute when there is no network; one short question comes first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PATIENCE = 5.0  # seconds


def within_reach(
    name_or_folder: str, options: dict[str, Any], file: str = "config.json"
) -> dict[str, Any]:
    """The options for ``from_pretrained``, with ``local_files_only`` where only the hub's cache can be had.

    Args:
        name_or_folder: what is to be loaded.
        options: the caller's.
        file: what a copy in the cache must have.
    """
    if Path(name_or_folder).is_dir():
        return options
    why = "local_files_only=True" if options.get("local_files_only") else _unreachable()
    if not why:
        return options
    if not _is_cached(name_or_folder, options, file):
        raise FileNotFoundError(
            f"no model {name_or_folder!r}: there is no such folder, it is not among the models that were downloaded "
            f"before, and no hub is asked ({why}). Give the folder of a saved model, or 'pocket', the small trained "
            "model in the package."
        )
    return {**options, "local_files_only": True}


def _unreachable() -> str:
    """Why the hub cannot be asked; nothing if it can."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint = huggingface_hub.constants.ENDPOINT
    try:
        huggingface_hub.get_session().head(endpoint, timeout=_PATIENCE)
    except (
        Exception
    ) as error:  # each version of the library has a transport, and errors, of its own
        return f"{endpoint} cannot be reached: {error}"
    return ""


def _is_cached(name: str, options: dict[str, Any], file: str) -> bool:
    import huggingface_hub

    where = {key: options.get(key) for key in ("cache_dir", "revision")}
    path = "/".join(filter(None, (options.get("subfolder"), file)))
    try:
        found = huggingface_hub.try_to_load_from_cache(name, path, **where)
    except huggingface_hub.errors.HFValidationError:  # no hub has such names
        return False
    return isinstance(found, str)
