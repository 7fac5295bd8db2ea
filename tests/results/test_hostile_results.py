"""Files of results that someone else has made: they load or say why not, and what they show is obeyed by nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import interpose as ip
from interpose.render import escape
from interpose.results.loading import result_of
from tests.results.hostile import ATTACKS, attacked, many, must_be_harmless, places
from tests.results.made import MADE, made


def loaded(data: Any) -> ip.Result | None:
    """The result, if that is one, else nothing: refused in a sentence."""
    try:
        return result_of(json.loads(json.dumps(data)), None, "'x.json'")
    except ip.FileError as error:
        said = str(error)
    assert said.startswith("'x.json'")
    assert len(said) < 20_000
    return None


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("count", [12, 60])
def test_no_text_of_a_result_is_obeyed(name: str, count: int, tmp_path: Path) -> None:
    data = made(name).to_dict()
    shown = 0
    for each in many(data, seed=len(name), count=count):
        result = loaded(each)
        if result is not None:
            must_be_harmless(result, tmp_path)
            shown += 1
    assert shown or not list(places(data))


def test_the_judge_of_pages_is_no_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one function forgets to escape, each kind of attack is found."""
    scores = made("Scores")
    for attack, medium in (
        (0, "html"),
        (1, "html"),
        (12, "terminal"),
        (13, "terminal"),
        (16, "csv"),
    ):
        data = attacked(scores.to_dict(), ("title",), ATTACKS[attack])
        data = attacked(data, ("axes", next(iter(data["axes"])), 0), ATTACKS[attack])
        result = loaded(data)
        assert result is not None
        must_be_harmless(result, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(escape, medium, lambda text, **_: str(text))
            with pytest.raises(AssertionError):
                must_be_harmless(result, tmp_path)
