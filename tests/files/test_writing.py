"""What is written takes its place at once, on regular files and new names alone; and every writer does it so."""

from __future__ import annotations

import ast
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

import interpose as ip
from interpose.files.writing import replacing, write_whole

PACKAGE = Path(ip.__file__).parent


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def stop_half_way(path: Path) -> None:
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"half")
        raise KeyboardInterrupt


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)  # nearly as long as a name may be
    assert write_whole(path, "ä\n") == path
    assert path.read_bytes() == b"\xc3\xa4\n"
    write_whole(str(path), b"\x00")
    assert path.read_bytes() == b"\x00"
    with pytest.raises(KeyboardInterrupt):
        stop_half_way(path)
    assert path.read_bytes() == b"\x00"
    assert names(tmp_path) == [path.name]


def test_permissions_are_those_of_the_file_before_or_of_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "x"
    before = os.umask(0o027)
    try:
        write_whole(path, "1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    for mode in (0o600, 0o664, 0o755):
        path.chmod(mode)
        write_whole(path, "2")
        assert stat.S_IMODE(path.stat().st_mode) == mode
    # A writer that makes the file anew, as safetensors and torch may, changes nothing of that.
    path.chmod(0o600)
    with replacing(path) as unfinished:
        torch.save({"a": torch.ones(2)}, unfinished)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real = tmp_path / "far" / "real"
    link = tmp_path / "link"
    link.symlink_to(real)  # which is not there yet
    write_whole(link, "1")
    write_whole(link, "2")
    assert link.is_symlink()
    assert real.read_text() == "2"
    assert names(tmp_path / "far") == ["real"]


def test_devices_pipes_and_folders_stay_what_they_are(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    device = Path("/dev/null").stat()
    only = "Files are written onto regular files and new names only."
    with pytest.raises(ip.FileError, match="is a pipe. " + only):
        write_whole(pipe, "x")
    for path in ("/dev/null", null):
        with pytest.raises(ip.FileError, match="is a device. " + only):
            write_whole(path, "x")
    with pytest.raises(IsADirectoryError, match="is a folder, and a file is written here"):
        write_whole(folder, "x")
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*none'"):
        write_whole(tmp_path / "none" / "x", "x")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert Path("/dev/null").stat().st_rdev == device.st_rdev
    assert names(tmp_path) == ["folder", "null", "pipe"]


def test_threads_that_write_one_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "x"
    contents = [bytes([65 + number]) * 100_000 for number in range(8)]
    seen: set[bytes] = set()

    def save(content: bytes) -> None:
        for _ in range(10):
            write_whole(path, content)
            seen.add(path.read_bytes())

    threads = [threading.Thread(target=save, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen <= set(contents)
    assert names(tmp_path) == ["x"]


def test_everything_that_writes_goes_through_the_one_helper() -> None:
    writers = {"write_text", "write_bytes", "save_file", "mkstemp", "NamedTemporaryFile", "touch"}
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.With)
            and any("replacing(" in ast.unparse(item.context_expr) for item in block.items)
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in inside:
                continue
            called = ast.unparse(node.func)
            opens = called.endswith(("open", "fdopen")) and not called.endswith("safe_open")
            modes = [a.value for a in ast.walk(node) if isinstance(a, ast.Constant)]
            writes = opens and any(isinstance(m, str) and set(m) & set("wax+") for m in modes)
            if called.split(".")[-1] in writers or called == "torch.save" or writes:
                found[f"{path.relative_to(PACKAGE)}: {called}"] = node.lineno
    allowed = {
        "files/writing.py: unfinished.open",
        "files/writing.py: path.open",  # only where nothing is
        "store/tensor_files.py: path.open",  # likewise, in a writer's folder of its own
        "jobs/ray_actor.py: torch.save",  # into memory
    }
    assert set(found) <= allowed, found
    exclusive = 'path.open("xb"'
    assert [
        (PACKAGE / name).read_text().count(exclusive)
        for name in ("files/writing.py", "store/tensor_files.py")
    ] == [1, 1]


@pytest.mark.parametrize("what", ["cache", "page", "json", "svg", "edits", "experiment", "png"])
def test_nothing_is_saved_onto_a_device_or_half_way(what: str, tmp_path: Path) -> None:
    cache = ip.Cache({"a": torch.ones(3)})
    scores = ip.Scores(title="t", values=torch.ones(2), axes={"layer": [0, 1]}, unit="u")
    net = ip.wrap(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1)))
    maps = ip.feature_maps(net, torch.ones(1, 1, 3, 3), "0")
    experiment = ip.Experiment(model="pocket", inputs=["a"], metrics=ip.metrics.loss())
    saves = {
        "cache": ("x", cache.save),
        "page": ("x.html", scores.save),
        "json": ("x.json", scores.save),
        "svg": ("x.svg", scores.save),
        "edits": ("edits.json", lambda path: ip.save_edits(path.parent, ip.zero("z"))),
        "experiment": ("x.json", experiment.save),
        "png": ("x.png", maps.save),
    }
    name, save = saves[what]
    path = tmp_path / name
    path.symlink_to("/dev/null")
    with pytest.raises(ip.FileError, match=r"is a device|is a link out of its folder"):
        save(path)
    path.unlink()
    save(path)
    assert names(tmp_path) == [name]
    assert path.stat().st_size > 10
