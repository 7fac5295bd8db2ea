"""Files that are whole or not there: what is written takes its place at once."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from interpose.errors import FileError


def write_whole(path: str | Path, content: bytes | str) -> Path:
    """Put a file in its place at once, and return where it is; what was there before stays if that fails.

    Args:
        path: a new name, or a regular file.
        content: its bytes, or a text, which is written in UTF-8.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """An empty file beside a path, to write to; it takes the path's place when the block ends well.

    Nothing of it is left when the block fails. A link is followed, and the file that it leads to is replaced.

    Args:
        path: a new name, or a regular file; never a folder, a device or a pipe.
    """
    target = Path(os.path.realpath(path))
    before = _replaceable(target, path)
    # A name that no other process has, nor another thread that saves there too.
    unfinished = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # less the umask
    try:
        if before is not None:
            _dress(unfinished, before)
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    settle(target.parent)


def create_whole(path: str | Path, content: bytes | str, *, by_way_of: Path | None = None) -> bool:
    """Put a file where none is, whole and for good; False if another was first. Of many who try, one succeeds.

    Args:
        path: a new name.
        content: its bytes, or a text, which is written in UTF-8.
        by_way_of: a folder of the same file system that it is written to first; by default that of ``path``. A process
            that is killed may leave an unfinished file there.
    """
    target = Path(path)
    content = content.encode() if isinstance(content, str) else content
    unfinished = (by_way_of or target.parent) / f".{target.name[:40]}.{secrets.token_hex(8)}"
    try:
        _write_new(unfinished, content)
        try:
            os.link(unfinished, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                _write_new(target, content)
            except FileExistsError:
                return False
    finally:
        unfinished.unlink(missing_ok=True)
    settle(target.parent)
    return True


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that know no second name of a file."""


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replaceable(target: Path, path: str | Path) -> os.stat_result | None:
    """What is there already, if a file may take its place; None if nothing is."""
    try:
        there = target.lstat()
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise FileNotFoundError(
                f"{str(path)!r} cannot be written: there is no folder {str(target.parent)!r}."
            ) from None
        return None
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(
            f"{str(path)!r} is a folder, and a file is written here. Give the name of a file in it."
        )
    if not stat.S_ISREG(there.st_mode):
        raise FileError(
            f"{str(path)!r} is {kind_of_file(there.st_mode)}. Files are written onto regular files and new names only."
        )
    if not os.access(target, os.W_OK):
        raise PermissionError(
            f"{str(path)!r} is read-only. Give another name, or make it writable."
        )
    return there


def kind_of_file(mode: int) -> str:
    """What stands under a name that is no regular file, in words."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link that leads nowhere",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def _dress(file: Path, like: os.stat_result) -> None:
    """Give a file the owner and the permissions of the one whose place it takes."""
    own = file.stat()
    if hasattr(os, "chown") and (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
        with suppress(PermissionError):  # only an administrator may give files away
            os.chown(file, like.st_uid, like.st_gid)
    file.chmod(stat.S_IMODE(like.st_mode))


def settle(folder: Path) -> None:
    """Make sure of a new name in a folder, where folders can be opened."""
    if os.name != "nt":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
