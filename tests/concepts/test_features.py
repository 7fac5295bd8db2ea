"""What units respond to, against everything kept and sorted by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.concepts.counts import BINS, edges
from interpose.concepts.firings import drawn
from tests.bounds import assert_near
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.models.texts import speaking
from tests.pages import LINKS, SCRIPT, Page, loads_nothing
from training.latents import NAMES

QUIET: dict[str, Any] = {"progress": False}
ALL = {"skip_special": False, "progress": False}


def rows(count: int = 70, seed: int = 3) -> list[list[int]]:
    """Texts of different lengths, more than one part of the data has."""
    draw = torch.Generator("cpu").manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=draw).tolist()
    return [torch.randint(10, 60, (n,), generator=draw).tolist() for n in lengths]


def autoencoder(kind: str = "topk", d: int = 32, width: int = 40) -> ip.SAE:
    made: ip.SAE = (
        ip.TopKSAE(d, width, k=5, seed=1) if kind == "topk" else ip.StandardSAE(d, width, seed=1)
    )
    return made.requires_grad_(False)


def model_of(name: str = "gpt2") -> Any:
    return ip.wrap(tiny.build(name))


def dense(model: Any, texts: list[list[int]], site: Any, sae: ip.SAE | None) -> list[Tensor]:
    """The units' values at every token, text by text: one run for each, nothing left out."""
    found = []
    for row in texts:
        _, cache = model.run_with_cache(torch.tensor([row]), names_filter=[site])
        x = cache[site][0].flatten(1)
        found.append(x if sae is None else sae.codes(x).dense())
    return found


def by_hand(values: list[Tensor], unit: int) -> list[tuple[float, int, int]]:
    """Every place where a unit is active, the strongest first."""
    places = [
        (float(value), row, pos)
        for row, each in enumerate(values)
        for pos, value in enumerate(each[:, unit].tolist())
        if value > 0
    ]
    return sorted(places, key=lambda place: (-place[0], place[1], place[2]))


@pytest.mark.parametrize("kind", ["topk", "standard", "neurons"])
def test_everything_that_is_counted_and_kept_is_that_of_all_values_sorted_by_hand(
    kind: str,
) -> None:
    model, texts = model_of(), rows()
    sae = None if kind == "neurons" else autoencoder(kind)
    site = ("post", 1) if sae is None else ("resid_post", 1)
    values = dense(model, texts, site, sae)
    found = ip.features(
        model, texts, sae=sae, site=site, k=4, sample=6, context=2, batch_size=8, **ALL
    )
    tokens = sum(map(len, texts))
    assert (found.token_count, found.text_count) == (tokens, len(texts))
    some_fire = 0
    for unit in found.units[:: 1 if sae else 7]:
        places, row = by_hand(values, unit), found.row(unit)
        some_fire += bool(places)
        assert found.density(unit) == len(places) / tokens
        assert int(found.counts.histogram[row].sum()) == len(places)
        assert math.isclose(
            float(found.counts.sums[row]), sum(v for v, _, _ in places), rel_tol=1e-4
        )
        said = found.examples(unit)
        assert len(said) == min(4, len(places))
        for one, (value, _, _) in zip(said, places):
            assert math.isclose(one["value"], value, rel_tol=1e-4, abs_tol=1e-6)
            assert math.isclose(
                float(values[one["row"]][one["pos"], unit]), value, rel_tol=1e-4, abs_tol=1e-6
            )
            at = range(one["pos"] - 2, one["pos"] + 3)
            around = [texts[one["row"]][p] if 0 <= p < len(texts[one["row"]]) else -1 for p in at]
            shown = [f" {token}" if token >= 0 else "" for token in around]
            assert one["words"] == shown
            for p, activation in zip(at, one["activations"]):
                if 0 <= p < len(texts[one["row"]]):
                    expected = max(0.0, float(values[one["row"]][p, unit]))
                    assert math.isclose(activation, expected, rel_tol=1e-4, abs_tol=1e-5)
                else:
                    assert math.isnan(activation)
    assert some_fire > 5


def test_units_below_zero_have_places_too_and_latents_have_none() -> None:
    model, texts = model_of(), rows(40)
    site = ("resid_post", 1)
    values = dense(model, texts, site, None)
    found = ip.features(model, texts, site="resid_post", layer=1, k=3, **ALL)
    for unit in (0, 9, 31):
        lowest = by_hand([-one for one in values], unit)[:3]
        said = found.examples(unit, bottom=True)
        assert [(one["row"], one["pos"]) for one in said] == [place[1:] for place in lowest]
        assert_near(
            torch.tensor([one["value"] for one in said]), -torch.tensor([v for v, _, _ in lowest])
        )
    latents = ip.features(model, texts, sae=autoencoder(), site=site, **ALL)
    assert latents.lowest is None
    assert latents.examples(0, bottom=True) == []


def same(one: ip.Features, other: ip.Features) -> None:
    for part in ("counts", "strongest", "drawn", "sample"):
        mine, theirs = getattr(one, part), getattr(other, part)
        for name in type(mine).__dataclass_fields__:
            a, b = getattr(mine, name), getattr(theirs, name)
            if isinstance(a, Tensor) and a.is_floating_point():
                a, b = (x.float().nan_to_num(-5, -7, -7) for x in (a, b))
                assert_near(a, b)
            else:
                assert (a == b).all() if isinstance(a, Tensor) else a == b, name


def test_parts_of_the_data_merge_into_what_the_whole_gives_in_any_order_of_batches() -> None:
    model, texts, sae = model_of(), rows(150), autoencoder()
    given: dict[str, Any] = {
        "sae": sae, "site": ("resid_post", 0), "k": 3, "sample": 4, "context": 1, "tokens_sampled": 90, **ALL
    }  # fmt: skip
    whole = ip.features(model, texts, batch_size=1, **given)
    parts = [ip.features(model, texts, batch_size=1, part=(n, 3), **given) for n in range(3)]
    assert min(part.token_count for part in parts) > 100  # each has some of it
    same(parts[0].merge(parts[1]).merge(parts[2]), whole)
    same(parts[2].merge(parts[0].merge(parts[1])), whole)
    other = ip.features(
        model, texts, batch_size=5, **given
    )  # rounds otherwise, so that ties may fall otherwise
    assert_near(other.strongest.values, whole.strongest.values)
    assert torch.equal(other.drawn.order, whole.drawn.order)
    assert torch.equal(other.sample.order, whole.sample.order)
    with pytest.raises(ValueError, match="skip_first differ"):
        whole.merge(ip.features(model, texts, skip_first=True, **given))


def test_the_random_sample_is_of_all_places_and_favours_none() -> None:
    model, texts, sae = model_of(), rows(300), autoencoder("standard")
    values = dense(model, texts, ("resid_post", 1), sae)
    found = ip.features(model, texts, sae=sae, site=("resid_post", 1), sample=25, **ALL)
    ranks = []
    for unit in found.units:
        places = by_hand(values, unit)
        if len(places) < 100:
            continue
        known = {place[1:]: at / (len(places) - 1) for at, place in enumerate(places)}
        drawn_ = [one for group in found.groups(unit) for one in group["examples"]]
        assert len({(one["row"], one["pos"]) for one in drawn_}) == 25
        ranks += [known[one["row"], one["pos"]] for one in drawn_]
        assert [group["high"] for group in found.groups(unit)] == sorted(
            (group["high"] for group in found.groups(unit)), reverse=True
        )
    assert len(ranks) > 400
    off = abs(sum(ranks) / len(ranks) - 0.5)
    assert off < 4 * math.sqrt(1 / 12 / len(ranks))  # ranks of a fair draw are uniform


def test_draws_are_the_same_everywhere_and_spread_evenly() -> None:
    assert drawn(1, torch.tensor([0, 1, 2])).tolist() == drawn(1, torch.tensor([0, 1, 2])).tolist()
    found = drawn(7, torch.arange(40000)).double() / 2**52
    assert bool(((found >= 0) & (found < 1)).all())
    counts = torch.histc(found, 20, 0, 1)
    assert float((counts - 2000).abs().max()) < 5 * math.sqrt(2000)


def test_units_active_together_are_those_that_a_table_of_all_tokens_gives() -> None:
    model, texts, sae = model_of(), rows(), autoencoder()
    on = torch.cat(dense(model, texts, ("resid_post", 1), sae)) > 0
    found = ip.features(model, texts, sae=sae, site=("resid_post", 1), **ALL)
    both = on.double().T @ on.double()
    either = on.sum(0)[:, None] + on.sum(0) - both
    shares = (both / either.clamp(min=1)).fill_diagonal_(0)
    unit = int(on.sum(0).argmax())
    said = found.together(unit, 5)
    best = shares[unit].sort(descending=True).values[:5]
    assert_near(torch.tensor([share for _, share in said]), best.float())
    assert all(math.isclose(shares[unit, other], share, rel_tol=1e-5) for other, share in said)
    near = {row for row, each in enumerate(texts) for _ in each}
    assert near
    nowhere = found.sample.without(found.row(unit))
    assert 0 < len(nowhere) < len(found.sample)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_logits_are_those_of_the_decoder_rows_through_the_final_norm_and_the_unembedding(
    name: str,
) -> None:
    module = tiny.build(name)
    model, sae = ip.wrap(module), autoencoder()
    found = ip.features(model, rows(20), sae=sae, site=("resid_post", 1), **ALL)
    assert found.effects is not None
    weight = {"gpt2": "transformer.ln_f.weight"}.get(name, "model.norm.weight")
    factor = module.get_parameter(weight) + (name == "gemma2")
    head = module.get_output_embeddings().weight
    rows_ = sae.rows - (sae.rows.mean(1, keepdim=True) if name == "gpt2" else 0)
    logits = (rows_ * factor) @ head.T
    for unit in (0, 17):
        best = logits[unit].topk(10)
        said = found.logits(unit)
        assert [int(word) for word, _ in said["up"]] == best.indices.tolist()
        assert_near(torch.tensor([by for _, by in said["up"]]), best.values)
        assert_near(
            torch.tensor([by for _, by in said["down"]]),
            logits[unit].topk(10, largest=False).values,
        )
    directions = torch.nn.functional.normalize(sae.rows, dim=1)
    cosines = (directions @ directions.T).fill_diagonal_(-2)
    other, cosine = found.alike(17)[0]
    assert other == int(cosines[17].argmax())
    assert math.isclose(cosine, float(cosines[17].max()), rel_tol=1e-4)


def test_neurons_write_rows_of_the_output_matrix_and_other_sites_say_why_they_have_no_logits() -> (
    None
):
    model = model_of("llama")
    found = ip.features(model, rows(20), site="post", layer=1, neuron=[3, 8], **ALL)
    assert found.effects is not None
    assert_near(found.effects.norms, model.W_out[1][[3, 8]].norm(dim=1))
    none = ip.features(model, rows(20), site="z", layer=1, head=2, **ALL)
    assert none.effects is None
    assert none.logits(0) == {"up": [], "down": []}
    assert "not a direction" in none.protocol["no_logits"]


def test_special_tokens_and_padding_do_not_count_and_positions_are_those_of_the_tokens() -> None:
    model = speaking("gpt2", adds_bos=True)
    texts = ["the cat sat on the mat", "a dog ran", "the cat"]
    plain = ip.features(model, texts, site="resid_post", layer=1, k=3, **QUIET)
    lengths = [len(model.to_tokens(text)[0]) for text in texts]
    assert plain.token_count == sum(lengths) - len(texts)  # BOS is the only special one
    for unit in (0, 5):
        for one in plain.examples(unit):
            tokens = model.to_tokens(texts[one["row"]])[0]
            assert one["token"] == model.to_single_str_token(int(tokens[one["pos"]]))
            assert one["pos"] > 0
    padded = ip.features(model, model.to_tokens(texts), site="resid_post", layer=1, k=3, **QUIET)
    same(padded, plain)
    every = ip.features(model, texts, site="resid_post", layer=1, k=3, **ALL)
    assert every.token_count == sum(lengths)


def test_looking_changes_neither_the_model_nor_the_autoencoder() -> None:
    module, sae = tiny.build("gpt2"), ip.BatchTopKSAE(32, 40, k=5)
    sae.threshold.fill_(0.05)
    model = ip.wrap(module)
    before, known = state_of(module), {n: v.clone() for n, v in sae.state_dict().items()}
    there = sae.train().attach(model, ("resid_post", 1))
    found = ip.features(model, rows(10), sae=there, **ALL)
    assert sae.training  # and yet it was asked as it is after training
    values = dense(model, rows(10), ("resid_post", 1), sae.eval())
    assert found.density(3) == sum(int((v[:, 3] > 0).sum()) for v in values) / found.token_count
    there.detach()
    assert same_state(before, state_of(module))
    assert all(torch.equal(known[name], value) for name, value in sae.state_dict().items())


def test_a_store_gives_what_its_texts_give_and_the_model_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts, sae = model_of(), rows(40), autoencoder()
    store = ip.harvest(model, texts, ("resid_post", 1), store=tmp_path / "s", progress=False)
    live = ip.features(model, texts, sae=sae, site=("resid_post", 1), **ALL)
    monkeypatch.setattr(type(model), "run_with_cache", lambda *a, **k: pytest.fail("the model ran"))
    same(ip.features(model, store, sae=sae, site=("resid_post", 1), **ALL), live)


def test_histograms_of_equal_bars_keep_every_value() -> None:
    model, texts, sae = model_of(), rows(), autoencoder()
    found = ip.features(model, texts, sae=sae, site=("resid_post", 1), **ALL)
    unit = found.units[int(found.counts.fired.argmax())]
    record = found.neuronpedia(unit)
    assert math.isclose(
        sum(record["freq_hist_data_bar_heights"]), int(found.counts.fired.max()), rel_tol=1e-6
    )
    assert len(edges()) == BINS + 1
    strongest = record["activations"][0]
    assert strongest["values"][strongest["qualifyingTokenIndex"]] == pytest.approx(
        record["maxActApprox"]
    )


def test_pages_load_nothing_link_to_each_other_and_obey_no_token(tmp_path: Path) -> None:
    model = ip.load("pocket")
    texts = ["<b onload=x>The Eiffel</b> Tower is in", "</script><script>alert(1)</script> Paris"]
    found = ip.features(model, texts, site="post", layer=3, neuron=list(range(9)), **QUIET)
    names = ip.Concepts.of({found.units[0]: "<img src=x onerror=y>"})
    index = found.save_pages(tmp_path / "pages", concepts=names)
    active = [u for u, fired in zip(found.units, found.counts.fired.tolist()) if fired]
    assert {path.name for path in index.parent.iterdir()} == {
        "index.html",
        *(f"{unit}.html" for unit in active),
    }
    for path in index.parent.iterdir():
        text = path.read_text("utf-8")
        links = [
            value
            for _, attributes in Page(text).tags
            for name, value in attributes.items()
            if name in LINKS and not (value or "").startswith(("data:", "#"))
        ]
        assert all((index.parent / str(link)).is_file() for link in links)
        for link in set(links):
            text = text.replace(f'href="{link}"', "")
        loads_nothing(text)
    assert "ip-find" in index.read_text("utf-8")


def test_pages_in_the_docs_are_of_the_latents_that_have_names_there() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert {path.stem for path in (docs / "latents").glob("*.html")} == {*map(str, NAMES), "index"}
    page = (docs / "concepts.md").read_text("utf-8")
    assert ip.Concepts.read(docs / "latents" / "concepts.csv").concepts == NAMES
    for unit, name in NAMES.items():
        assert f"| [{unit}](latents/{unit}.html) | {name} |" in page.replace('"', "")
        assert SCRIPT in (docs / "latents" / f"{unit}.html").read_text("utf-8")


def test_what_cannot_be_looked_at_is_said() -> None:
    model, texts = model_of(), rows(3)
    with pytest.raises(ValueError, match="say which site"):
        ip.features(model, texts, **QUIET)
    with pytest.raises(ValueError, match="head=0"):
        ip.features(model, texts, site="z", layer=1, **QUIET)
    with pytest.raises(ValueError, match="vector at each position"):
        ip.features(model, texts, site="pattern", layer=1, **QUIET)
    with pytest.raises(ip.EditShapeError, match="33"):
        ip.features(model, texts, sae=autoencoder(d=33), site=("resid_post", 1), **QUIET)
    with pytest.raises(ValueError, match="does not say which site"):
        ip.features(model, texts, sae=autoencoder(), **QUIET)
    with pytest.raises(IndexError):
        ip.features(model, texts, sae=autoencoder(), site=("resid_post", 1), neuron=40, **QUIET)
    with pytest.raises(ValueError, match="no texts"):
        ip.features(model, [], site="post", layer=1, **QUIET)
    found = ip.features(model, texts, site="post", layer=1, neuron=[2, 5], **QUIET)
    with pytest.raises(KeyError, match="no unit 3"):
        found.density(3)
