"""Names of models without a network: told at once, and what was downloaded before still loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import interpose as ip
from interpose.cli.main import main
from interpose.models import loading


class Dead:
    """A session without a network, which counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def head(self, url: str, **options: Any) -> None:
        assert options["timeout"] <= 10
        self.asked.append(url)
        raise ConnectionError("no route")

    def request(self, *args: Any, **options: Any) -> None:
        raise AssertionError("the hub is asked again and again")

    get = post = stream = build_request = send = request


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Dead:
    session = Dead()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return session


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of the hub's library, with the pocket model as it keeps what it downloaded."""
    home = tmp_path / "models--org--tiny"
    shutil.copytree(loading.POCKET, home / "snapshots" / "abc123")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123")
    return tmp_path


def test_a_name_that_is_nowhere_is_told_at_once(dead: Dead, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        ip.load("org/tiny", cache_dir=str(tmp_path))
    assert str(caught.value) == (
        "no model 'org/tiny': there is no such folder, it is not among the models that were downloaded before, and no "
        f"hub is asked ({huggingface_hub.constants.ENDPOINT} cannot be reached: no route). Give the folder of a saved "
        "model, or 'pocket', the small trained model in the package."
    )
    assert len(dead.asked) == 1
    with pytest.raises(FileNotFoundError, match="no model 'a/b/c'"):
        ip.load("a/b/c")


def test_what_was_downloaded_loads_without_a_network(dead: Dead, cache: Path) -> None:
    model = ip.load("org/tiny", cache_dir=str(cache), device="cpu")
    own = ip.load("pocket", device="cpu")
    assert len(dead.asked) == 1
    assert torch.equal(model("The cat"), own("The cat"))
    with pytest.raises(FileNotFoundError, match="no model 'org/tiny'"):
        ip.load("org/tiny", cache_dir=str(cache), revision="other")


def test_the_hub_is_not_asked_where_it_is_not_wanted(
    dead: Dead, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ip.load("org/tiny", cache_dir=str(cache), device="cpu", local_files_only=True)
    ip.load(str(loading.POCKET), device="cpu")
    with pytest.raises(FileNotFoundError, match=r"no hub is asked \(local_files_only=True\)"):
        ip.load("org/other", cache_dir=str(cache), local_files_only=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"no hub is asked \(HF_HUB_OFFLINE is set\)"):
        ip.load("org/other", cache_dir=str(cache))
    assert not dead.asked


def test_a_tokenizer_that_is_nowhere_is_none(dead: Dead) -> None:
    assert loading.tokenizer_of("org/tiny-that-is-not-there") is None
    assert loading.tokenizer_of("pocket") is not None


def test_the_command_line_names_what_can_be_given(
    dead: Dead, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sites", "gpt2-that-is-not-there"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Give the folder of a saved model, or 'pocket'" in shown.err
