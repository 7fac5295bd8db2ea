"""A cluster of Ray: the one that this program knows, or one on this machine for as long as a job takes.

One that is begun here is only of this machine, reports nothing to anybody, and leaves the process and the disk as they
were: Ray changes handlers of signals, environment variables and the hook for exceptions, and keeps its files.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interpose.errors import Unsupported

_TOKEN = secrets.token_hex(32)
"""What programs have to show to a cluster that is begun here. Ray reads it once in a process."""
_LONGEST = 40
"""How long a folder's path may be: Ray adds some 60 letters, and a socket's path has 107 at most, or 104."""


def ray_module() -> Any:
    """Ray, if it is installed."""
    with _as_it_was():
        try:
            import ray
        except ImportError:
            raise Unsupported("engine='ray' needs Ray: pip install 'interpose[ray]'.") from None
    return ray


@contextmanager
def cluster(workers: int | None) -> Iterator[Any]:
    """Ray, joined where the program has joined a cluster or ``RAY_ADDRESS`` names one, else begun and ended here.

    Args:
        workers: how many processes will be asked for, if that is known.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "configure_logging": False}
    with _as_it_was():
        address = os.environ.get("RAY_ADDRESS")
        if address and address != "local":
            try:
                ray.init(address=address, **quiet)
            except Exception as error:
                raise ConnectionError(
                    f"no cluster of Ray answers at RAY_ADDRESS={address!r}: {error}"
                ) from error
            try:
                yield ray
            finally:
                ray.shutdown()
            return
        folder = tempfile.mkdtemp(prefix="interpose-ray-", dir=_short_folder())
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if not _has_token():  # Ray would keep one in the user's home
            os.environ["RAY_AUTH_TOKEN"] = _TOKEN
        cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        try:
            with _quietly():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=max(workers or 1, len(cores)),
                    _temp_dir=folder,
                    **quiet,
                )
            yield ray
        finally:
            with _quietly():
                ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> str | None:
    """Where temporary files go, unless that has so long a name that Ray's sockets could not be there."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST or not Path("/tmp").is_dir() else "/tmp"


def _has_token() -> bool:
    """Whether the user has a token for clusters, which is taken then."""
    named = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").exists()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what Ray advises about tokens, and what Python says of files and processes that Ray forgets (2.40)."""
    logger = logging.getLogger("ray._private.authentication")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
            gc.collect()  # here, where it is ignored
    finally:
        logger.setLevel(level)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Put back what Ray changes in the process."""
    environment, hook = dict(os.environ), sys.excepthook
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
                del os.environ[name]
        os.environ.update({n: v for n, v in environment.items() if n.startswith("RAY_")})
        sys.excepthook = hook
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
