"""Batches of a store and of a live model: every vector once, in an order that goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.activations import Activations
from interpose.store.sources import Done, Indexed, Streamed, source_of
from tests.bounds import assert_near
from tests.models import tiny

TEXTS = [[3 + (5 * row + place) % 40 for place in range(2 + (3 * row) % 7)] for row in range(40)]
SITES = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]
Seen = list[tuple[int, int]]


@pytest.fixture(scope="module")
def model() -> ip.TransformerModel:
    made = ip.wrap(tiny.build("llama"))
    assert isinstance(made, ip.TransformerModel)
    return made


@pytest.fixture(scope="module")
def store(model: ip.TransformerModel, tmp_path_factory: pytest.TempPathFactory) -> ip.Store:
    folder = tmp_path_factory.mktemp("stores") / "s"
    return ip.harvest(model, TEXTS, SITES, store=folder, segment_texts=6, progress=False)


def places(batches: Iterator[ip.ActivationBatch]) -> Seen:
    return [pair for batch in batches for pair in zip(batch.row.tolist(), batch.pos.tolist())]


EVERYWHERE = [(row, place) for row, tokens in enumerate(TEXTS) for place in range(len(tokens))]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("pool", [None, 40, 7])
def test_every_vector_comes_once_with_its_own_values(
    store: ip.Store, pool: int | None, shuffle: bool
) -> None:
    assert isinstance(store, Activations)
    found: Seen = []
    for batch in store.batches(batch_size=16, pool=pool, shuffle=shuffle):
        assert 0 < len(batch) <= 16
        found += zip(batch.row.tolist(), batch.pos.tolist())
        for site in SITES:
            assert torch.equal(batch[site], store.gather(site, batch.row, batch.pos))
        tokens = [TEXTS[row][place] for row, place in zip(batch.row.tolist(), batch.pos.tolist())]
        assert batch.tokens.tolist() == tokens
    assert sorted(found) == EVERYWHERE
    assert (found == EVERYWHERE) is not shuffle


def test_the_seed_decides_the_order_and_epochs_differ(store: ip.Store) -> None:
    def order(**options: Any) -> Seen:
        return places(store.batches(SITES[0], batch_size=16, **options))

    assert order(seed=1) == order(seed=1) != order(seed=2)
    both = order(seed=1, epochs=2)
    first, second = both[: len(EVERYWHERE)], both[len(EVERYWHERE) :]
    assert first == order(seed=1)
    assert sorted(second) == EVERYWHERE
    assert first != second


def test_vectors_are_mixed_over_the_whole_store(store: ip.Store) -> None:
    """Neighbours in a batch are from rows as far apart as rows that are drawn at random."""
    order = places(store.batches(SITES[0], batch_size=16))
    apart = [abs(one[0] - other[0]) for one, other in pairwise(order)]
    assert sum(apart) / len(apart) > len(TEXTS) / 5  # a third, where nothing is left of the order
    assert len({row // 6 for row, _ in order[:16]}) >= 4


@pytest.mark.parametrize("after", [0, 1, 3, 5, 11, 14])
@pytest.mark.parametrize("live", [False, True])
def test_it_goes_on_in_the_middle_of_an_epoch(
    model: ip.TransformerModel, store: ip.Store, after: int, live: bool
) -> None:
    def made() -> Any:
        options: dict[str, Any] = {"batch_size": 16, "pool": 40, "epochs": 2, "most_norm": 1.5}
        if live:
            return ip.stream(model, TEXTS, SITES[0], **options)
        return store.batches(SITES[0], **options)

    whole = made()
    wanted = [batch[SITES[0]] for batch in whole]
    first = made()
    begun = [next(first)[SITES[0]] for _ in range(after)]
    state = json.loads(json.dumps(first.state_dict()))
    second = made()
    second.load_state_dict(state)
    found = begun + [batch[SITES[0]] for batch in second]
    assert len(found) == len(wanted) > after
    for one, other in zip(found, wanted):
        assert_near(one, other)
    assert second.left_out == whole.left_out > 0


def test_consumers_share_all_vectors_between_them(store: ip.Store) -> None:
    parts = [
        places(store.batches(SITES[0], batch_size=16, pool=20, part=(number, 3)))
        for number in range(3)
    ]
    assert all(parts)
    assert sorted(chain.from_iterable(parts)) == EVERYWHERE


def test_vectors_far_longer_than_the_median_are_left_out_and_counted(store: ip.Store) -> None:
    values = store.gather(SITES[0], *torch.tensor(EVERYWHERE).T)
    norms = values.norm(dim=1)
    far = {place for place, norm in zip(EVERYWHERE, norms) if norm > 1.3 * norms.median()}
    assert 0 < len(far) < len(EVERYWHERE) / 2
    batches = store.batches(SITES[0], batch_size=16, most_norm=1.3)
    assert sorted(places(batches)) == sorted(set(EVERYWHERE) - far)
    assert batches.left_out == len(far)


def test_first_positions_can_be_left_out(model: ip.TransformerModel, store: ip.Store) -> None:
    wanted = [place for place in EVERYWHERE if place[1] >= 1]
    assert sorted(places(store.batches(SITES[0], pos=slice(1, None)))) == wanted
    assert sorted(places(ip.stream(model, TEXTS, SITES[0], pos=slice(1, None)))) == wanted
    with pytest.raises(ValueError, match="counts from the front"):
        next(store.batches(SITES[0], pos=slice(-2, None)))


def test_a_live_model_gives_what_its_store_has(model: ip.TransformerModel, store: ip.Store) -> None:
    found: Seen = []
    for batch in ip.stream(model, TEXTS, SITES, batch_size=16, pool=50):
        found += zip(batch.row.tolist(), batch.pos.tolist())
        for site in SITES:
            assert_near(batch[site], store.gather(site, batch.row, batch.pos))
    assert sorted(found) == EVERYWHERE


def test_epochs_none_never_ends_and_nothing_ends_at_once(
    store: ip.Store, model: ip.TransformerModel
) -> None:
    endless = store.batches(SITES[0], batch_size=200, epochs=None)
    assert len([next(endless) for _ in range(5)]) == 5
    nothing = store.batches(SITES[0], pos=slice(50, None), epochs=None)
    with pytest.raises(StopIteration):
        next(nothing)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"batch_size": 0}, ValueError, "batch_size is at least 1"),
        ({"part": (3, 3)}, ValueError, "part is a number and how many there are"),
        ({"site": "blocks.0.hook_resid_pots"}, ip.SiteNotFound, "Did you mean"),
    ],
    ids=str,
)
def test_mistakes_are_answered(
    store: ip.Store, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        store.batches(**options)


@pytest.mark.parametrize("row", [40, -41, [0, 40]])
def test_rows_and_positions_that_are_not_there_are_refused(store: ip.Store, row: Any) -> None:
    with pytest.raises(IndexError, match="0 to 39"):
        store.gather(SITES[0], row, 0)
    with pytest.raises(IndexError, match=r"pos \d+ is not there"):
        store.gather(SITES[0], 0, 60)


def test_sites_answer_to_all_their_names(store: ip.Store) -> None:
    wanted = store[3][SITES[0]]
    for name in (("resid_post", 0), "resid_post.0", "blocks.0.hook_out", ("resid_post", -2)):
        if name != "resid_post.0":
            assert torch.equal(store[3][name], wanted)
            assert store.site(name) == SITES[0]


def test_statistics_are_those_of_all_vectors(store: ip.Store) -> None:
    for site in SITES:
        values = store.gather(site, *torch.tensor(EVERYWHERE).T).flatten(1).double()
        found = store.statistics(site)[site]
        assert found.count == len(EVERYWHERE)
        torch.testing.assert_close(found.mean, values.mean(0))
        torch.testing.assert_close(found.variance, values.var(0))
        torch.testing.assert_close(found.minimum, values.amin(0))
        torch.testing.assert_close(found.maximum, values.amax(0))


# Where texts come from.


class Streaming:
    """A streamed data set as such libraries have them: it tells where it is, and goes on from there."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.at = 0
        self.given: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.items):
            number, self.at = self.at, self.at + 1
            self.given.append(number)
            yield self.items[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def records() -> list[dict[str, Any]]:
    return [{"tokens": tokens} for tokens in TEXTS]


def until_one(folder: Path) -> Callable[[int, int | None], bool]:
    """Ends a harvest at 80 tokens, when something is committed."""

    def goes_on(done: int, total: int | None) -> bool:
        if done < 80:
            return True
        for _ in range(6000):
            if any(folder.glob("commits/0*.json")):
                break
            time.sleep(0.01)
        return False

    return goes_on


@pytest.mark.parametrize("kind", ["list", "generator", "dataset", "streaming"])
def test_texts_of_any_kind_make_the_same_segments(
    model: ip.TransformerModel, store: ip.Store, kind: str, tmp_path: Path
) -> None:
    made: dict[str, Any] = {
        "list": lambda: records(),
        "generator": lambda: (record for record in records()),
        "dataset": lambda: torch.utils.data.Subset(records(), range(40)),  # type: ignore[arg-type]
        "streaming": lambda: Streaming(records()),
    }
    options: dict[str, Any] = {"store": tmp_path / kind, "segment_texts": 6, "column": "tokens"}

    with pytest.raises(ip.Cancelled):
        ip.harvest(model, made[kind](), SITES, progress=until_one(tmp_path / kind), **options)
    begun = ip.open_store(tmp_path / kind)
    assert 0 < len(begun) < len(TEXTS)
    texts = made[kind]()
    found = ip.harvest(model, texts, SITES, progress=False, **options)
    assert found.complete
    for mine, other in zip(found.segments, store.segments):
        assert (mine.commit.folder, mine.commit.digest) == (
            other.commit.folder,
            other.commit.digest,
        )
    if kind == "streaming":
        assert texts.given[0] >= len(begun)  # those before were not even asked for


def test_an_iterator_whose_texts_have_changed_is_noticed(
    model: ip.TransformerModel, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"store": tmp_path / "s", "segment_texts": 6}
    with pytest.raises(ip.Cancelled):
        ip.harvest(model, iter(TEXTS), SITES, progress=until_one(tmp_path / "s"), **options)
    with pytest.raises(ip.FileError, match="other texts"):
        ip.harvest(model, iter([[9, 9, 9], *TEXTS[1:]]), SITES, progress=False, **options)


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    lines = ["Hello there", "", "  two  ", "Grüße"]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    said = [json.dumps({"body": text, "n": 1}) for text in lines if text]
    (tmp_path / "a.jsonl").write_text("\n".join(said) + "\n", encoding="utf-8")
    for name, column in (("a.txt", "text"), ("a.jsonl", "body")):
        source = source_of(str(tmp_path / name), column)
        assert isinstance(source, Indexed)
        assert source.peek(10) == [text for text in lines if text]
        shards = list(source.shards(2, {0: Done()}))
        assert [(shard.number, shard.first, shard.items, shard.last) for shard in shards] == [
            (1, 2, ("Grüße",), True)
        ]
    with pytest.raises(ValueError, match=r"no field 'text'; it has 'body', 'n'"):
        source_of(str(tmp_path / "a.jsonl")).peek(1)


@pytest.mark.parametrize("peeked", [0, 3, 9, 100])
@pytest.mark.parametrize("size", [1, 4, 10, 11])
def test_a_stream_loses_nothing_by_being_looked_at(size: int, peeked: int) -> None:
    source = Streamed(iter([[n] for n in range(10)]), lambda item: item)
    assert source.peek(peeked) == [[n] for n in range(min(peeked, 10))]
    shards = list(source.shards(size, {}))
    assert [item for shard in shards for item in shard.items] == [[n] for n in range(10)]
    assert [shard.last for shard in shards] == [False] * (len(shards) - 1) + [True]
    assert [shard.first for shard in shards] == list(range(0, 10, size))


def test_sites_are_meant_by_name_kind_or_glob(tmp_path: Path) -> None:
    store = ip.harvest(
        ip.wrap(tiny.build("gpt2")), [[3, 4, 5]], ["resid_post", "z"], store=tmp_path / "s", progress=False
    )  # fmt: skip
    streams = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    for asked in (
        "resid_post",
        "blocks.*.hook_resid_post",
        streams,
        [("resid_post", 0), "resid_post"],
    ):
        assert sorted(next(store.batches(asked)).values) == streams
        assert [row.site for row in store.statistics(asked).rows] == streams
    with pytest.raises(ip.SiteNotFound, match="'mlp_out' is not in this store"):
        store.batches("mlp_out")


@pytest.mark.parametrize("epochs", [3, None])
@pytest.mark.parametrize("pool", [None, 40])
def test_it_goes_on_after_any_batch_also_the_last_of_an_epoch(
    store: ip.Store, pool: int | None, epochs: int | None
) -> None:
    options: dict[str, Any] = {"batch_size": 50, "pool": pool, "epochs": epochs}
    whole = store.batches(SITES[0], **options)
    batches = [next(whole) for _ in range(2 * len(EVERYWHERE) // 50)]
    for count in range(len(batches) - 1):
        first = store.batches(SITES[0], **options)
        for _ in range(count):
            next(first)
        later = store.batches(SITES[0], **options)
        later.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found = next(later)
        assert torch.equal(found.row, batches[count].row), count
        assert torch.equal(found.pos, batches[count].pos), count
