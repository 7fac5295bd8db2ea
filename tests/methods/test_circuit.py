"""Circuits against a forward pass in which edges are cut by hand, and on the pocket model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.methods.wiring import Graph, wiring
from tests.leftovers import same_state, state_of
from tests.methods.masked_edges import masked_gpt2, masked_run, sites, written
from tests.models import tiny
from tests.pages import loads_nothing

METRIC = ip.metrics.logit_difference(5, 6)
TYPES = ["gpt2", "llama", "gemma2", "gpt_neox", "granite", "olmo2"]
SHARED_NORM = ["gptj", "falcon", "cohere"]


def model_of(name: str) -> Any:
    return ip.wrap(tiny.build(name, layers=2))


def pair() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    clean = torch.randint(10, 60, (2, 7), generator=draw)
    corrupt = clean.clone()
    corrupt[:, 2] = torch.randint(60, 70, (2,), generator=draw)
    return clean, corrupt


def circuit_of(graph: Graph, kept: Tensor) -> ip.Circuit:
    places = kept.nonzero().tolist()
    return ip.Circuit(
        graph=graph, edges=tuple((graph.writers[w], graph.readers[r]) for w, r in places)
    )


def some_edges(graph: Graph, share: float, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return graph.possible & (torch.rand(graph.possible.shape, generator=draw) < share)


def every_logit(model: Any, clean: Tensor, corrupt: Tensor, kept: list[Tensor]) -> list[Tensor]:
    """The last logits of each circuit's run, through the public function and a metric that keeps what it sees."""
    seen: list[Tensor] = []

    def metric(logits: Tensor) -> Tensor:
        seen.append(logits[:, -1])
        return logits[:, -1, 5]

    circuits = [circuit_of(wiring(model).graph, one) for one in kept]
    found = ip.faithfulness(
        model, clean, corrupt, metric=metric, circuits=circuits, max_rows=2 * len(clean)
    )
    return [next(one for one in seen if torch.equal(one[:, 5], row)) for row in found.each]


def lead(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 6]


@pytest.mark.parametrize("name", [*TYPES, *SHARED_NORM])
def test_all_edges_are_the_clean_run_and_none_are_the_corrupt_run(name: str) -> None:
    model, (clean, corrupt) = model_of(name), pair()
    possible = wiring(model).graph.possible
    every, none = every_logit(model, clean, corrupt, [possible, possible & False])
    with torch.no_grad():
        whole, without = model(clean)[:, -1], model(corrupt)[:, -1]
    assert (whole - without).abs().max() > 0.1
    torch.testing.assert_close(every, whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(none, without, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_circuits_are_runs_in_which_all_other_edges_are_cut(name: str) -> None:
    model, (clean, corrupt) = model_of(name), pair()
    graph = wiring(model).graph
    kept = [some_edges(graph, share, seed) for seed, share in enumerate((0.9, 0.5, 0.5))]
    found = every_logit(model, clean, corrupt, kept)
    with torch.no_grad():
        _, cache = model.run_with_cache(corrupt, names_filter=sites(model))
        other = written(model, {site: cache[site] for site in sites(model)})
        whole, without = model(clean)[:, -1], model(corrupt)[:, -1]
        for one, logits in zip(kept, found):
            cut = (graph.possible & ~one).float()
            expected = masked_run(model, clean, cut, other, graph)[:, -1]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            assert (expected - whole).abs().max() > 0.02
            assert (expected - without).abs().max() > 0.02


def test_cutting_one_edge_is_a_hand_written_forward() -> None:
    model, (clean, corrupt) = model_of("gpt2"), pair()
    graph = wiring(model).graph
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    best = [(place["writer"], place["reader"]) for place in scores.top(len(graph))]
    edges = [
        edge for role in "qkv1" for edge in [one for one in best if one[1].endswith(role)][:9:3]
    ]
    assert len(edges) == 12
    kept, cuts = [], []
    for writer, reader in [*edges, ("a0.h1", "logits"), ("m0", "m1")]:
        cut = torch.zeros(graph.possible.shape)
        cut[graph.writers.index(writer), graph.readers.index(reader)] = 1
        cuts.append(cut)
        kept.append(graph.possible & ~cut.bool())
    found = every_logit(model, clean, corrupt, kept)
    with torch.no_grad():
        whole, other = (
            masked_gpt2(model.module, clean)[0][:, -1],
            masked_gpt2(model.module, corrupt)[1],
        )
        for cut, logits in zip(cuts, found):
            expected = masked_gpt2(model.module, clean, cut, other)[0][:, -1]
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
            assert (expected - whole).abs().max() > 1e-3


def test_scores_are_the_effects_of_single_edges_where_the_texts_hardly_differ() -> None:
    module = tiny.build("llama", layers=2)
    clean, corrupt = pair()
    table = module.get_input_embeddings().weight
    with torch.no_grad():  # the other token is the same one, moved a little
        draw = torch.Generator().manual_seed(0)
        moved = 0.01 * torch.randn(2, table.shape[1], generator=draw)
        table[corrupt[:, 2]] = table[clean[:, 2]] + moved
    model = ip.wrap(module)
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    graph = scores.graph
    places = [(x["writer"], x["reader"]) for x in scores.top(25)]
    circuits = []
    for writer, reader in places:
        kept = graph.possible
        kept[graph.writers.index(writer), graph.readers.index(reader)] = False
        circuits.append(circuit_of(graph, kept))
    curve = ip.faithfulness(model, clean, corrupt, metric=METRIC, circuits=circuits)
    exact = (curve.each - curve.clean).mean(1)
    guess = torch.tensor([scores.at(writer=writer, reader=reader) for writer, reader in places])
    assert guess.abs().min() > 1e-4
    torch.testing.assert_close(exact, guess, atol=2e-5, rtol=0.1)


def test_edges_on_no_path_carry_nothing_and_are_left_out() -> None:
    model, (clean, corrupt) = model_of("llama"), pair()
    graph = wiring(model).graph
    kept = some_edges(graph, 0.1, 3)
    edges = circuit_of(graph, kept).edges
    path = graph.connected(edges)
    assert 0 < len(path) < len(edges)
    mask = circuit_of(graph, kept & False).mask
    for writer, reader in path:
        mask[graph.writers.index(writer), graph.readers.index(reader)] = True
    every, some = every_logit(model, clean, corrupt, [kept, mask])
    torch.testing.assert_close(every, some, atol=1e-5, rtol=1e-5)
    assert graph.connected([("input", "m0"), ("m1", "logits")]) == []
    through_group = [("input", "a0.kv1.v"), ("a0.h3", "logits"), ("a0.h0", "logits")]
    assert graph.connected(through_group) == through_group[:2]


def pocket_pairs() -> tuple[list[str], list[str], Any]:
    story = "When {} and {} went to the store, {} gave a drink to"
    names = [("Mary", "John"), ("Anna", "Tom"), ("Paul", "Kate"), ("Mark", "Lucy")]
    metric = ip.metrics.logit_difference([f" {a}" for a, _ in names], [f" {b}" for _, b in names])
    clean = [story.format(a, b, b) for a, b in names]
    return clean, [story.format(a, b, a) for a, b in names], metric


def test_a_small_circuit_of_the_pocket_model_finds_the_indirect_object() -> None:
    model = ip.load("pocket")
    clean, corrupt, metric = pocket_pairs()
    scores = ip.edge_attribution(model, clean, corrupt, metric=metric, steps=5)
    curve = ip.faithfulness(
        model, clean, corrupt, metric=metric, scores=scores, sizes=[20, 50, 200, 1000, 3018]
    )
    assert curve.at(edges=50) > 0.85
    assert curve.at(edges=200) > 0.85
    assert curve.at(edges=3018) == pytest.approx(1, abs=1e-4)
    for seed in range(2):
        chance = scores.shuffled(seed)
        random = ip.faithfulness(
            model, clean, corrupt, metric=metric, scores=chance, sizes=[200, 1000]
        )
        assert random.values.abs().max() < 0.2
    assert 0.9 < curve.area < 1.01
    assert 0 < curve.distance < 0.1
    nodes = scores.circuit(edges=50).nodes
    assert {"input", "m0", "m6", "a6.h0", "a5.h1", "logits"} <= set(nodes)


def test_texts_in_any_batches_give_the_same() -> None:
    model = ip.load("pocket")
    clean, corrupt, metric = pocket_pairs()
    scores = ip.edge_attribution(model, clean, corrupt, metric=metric, steps=2)
    curves = [
        ip.faithfulness(
            *(model, clean, corrupt),
            metric=metric,
            scores=scores,
            sizes=[100, 600],
            batch_size=size,
        )
        for size in (3, 4)
    ]
    torch.testing.assert_close(curves[0].each, curves[1].each, atol=1e-3, rtol=1e-3)
    assert [curve.protocol["forwards"] for curve in curves] == [8, 4]
    assert all(curve.protocol["plan"].startswith("wavefront, ") for curve in curves)
    assert curves[0].each.shape == (2, 4)


def test_a_curve_that_is_ended_keeps_the_circuits_that_are_done() -> None:
    model, (clean, corrupt) = model_of("gpt2"), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    options: dict[str, Any] = {"metric": METRIC, "scores": scores, "sizes": [20, 60, 100]}
    whole = ip.faithfulness(model, clean, corrupt, batch_size=1, **options)
    told: list[int] = []

    def stop(done: int, total: int | None) -> bool:
        told.append(done)
        assert total == 6
        return done < 4

    with pytest.raises(ip.Cancelled, match="ended after row 4 of 6") as caught:
        ip.faithfulness(model, clean, corrupt, batch_size=1, progress=stop, **options)
    some = caught.value.result
    done = ~some.each.isnan()
    assert done.sum() == told[-1] == 4
    torch.testing.assert_close(some.each[done], whole.each[done])
    assert not some.values.isnan().any()


def test_areas_are_those_of_the_curve() -> None:
    curve = ip.Faithfulness(
        title="",
        values=torch.tensor([0.5, 1.5]),
        axes={"edges": [10, 50]},
        unit="",
        each=torch.zeros(2, 1),
        clean=torch.ones(1),
        corrupt=torch.zeros(1),
        possible=100,
    )
    assert curve.area == pytest.approx(0.1 * 0.25 + 0.4 * 1.0 + 0.5 * 1.25)
    assert curve.distance == pytest.approx(0.1 * 0.75 + 0.4 * 0.5 + 0.5 * 0.25)
    again = type(curve).from_dict(json.loads(json.dumps(curve.to_dict())))
    assert torch.equal(again.each, curve.each)
    assert again.area == curve.area


def test_what_does_not_fit_is_refused() -> None:
    model, (clean, corrupt) = model_of("gpt2"), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    circuit = scores.circuit(edges=30)

    def run(model: Any = model, corrupt: Any = corrupt, **more: Any) -> Any:
        return ip.faithfulness(model, clean, corrupt, metric=METRIC, **more)

    with pytest.raises(ValueError, match=r"give circuits=\.\.\., or scores=\.\.\. and sizes="):
        run(scores=scores)
    with pytest.raises(
        ValueError, match="a circuit of another model: it has 11 writers and 27 readers, this model"
    ):
        run(model_of("llama"), circuits=circuit)
    with pytest.raises(ValueError, match="give corrupt, as long as clean"):
        run(corrupt=None, circuits=circuit)
    with pytest.raises(ValueError, match="there is nothing that a circuit could bring back"):
        run(corrupt=clean, circuits=circuit)
    with pytest.raises(
        ValueError, match=r"no edge from 'a9.h0' to 'logits': writers are input, a0.h0"
    ):
        ip.Circuit(graph=scores.graph, edges=(("a9.h0", "logits"),))
    with pytest.raises(ValueError, match="'m1' to 'm0': it is written after it is read"):
        ip.Circuit(graph=scores.graph, edges=(("m1", "m0"),))
    with pytest.raises(ValueError, match=r"not what Circuit.to_dict writes"):
        ip.Circuit.from_dict({})


def test_nothing_is_left_behind() -> None:
    module = tiny.build("gemma2", layers=2)
    model, (clean, corrupt) = ip.wrap(module), pair()
    scores = ip.edge_attribution(model, clean, corrupt, metric=METRIC)
    before = state_of(module)
    ip.faithfulness(model, clean, corrupt, metric=METRIC, scores=scores, sizes=[20])
    with pytest.raises(ValueError, match="one number for each example"):
        ip.faithfulness(
            model, clean, corrupt, metric=lambda logits: logits[0], scores=scores, sizes=[20]
        )
    assert same_state(before, state_of(module))


def test_a_circuit_is_data_and_a_drawing(tmp_path: Path) -> None:
    model, (clean, corrupt) = model_of("llama"), pair()
    circuit = ip.edge_attribution(model, clean, corrupt, metric=METRIC).circuit(edges=40)
    assert 20 <= len(circuit) <= 40
    assert ip.Circuit.from_dict(json.loads(json.dumps(circuit.to_dict()))) == circuit
    assert set(circuit.graph.connected(circuit.edges)) == set(circuit.edges)
    assert circuit.nodes[0] == "input"
    assert circuit.nodes[-1] == "logits"
    assert int(circuit.mask.sum()) == len(circuit)
    assert repr(circuit).startswith(f"Circuit of {len(circuit)} of {len(circuit.graph)} edges")
    drawing = circuit.save(tmp_path / "circuit.svg").read_text()
    assert drawing.count("<rect") == len(circuit.nodes) + 1
    assert drawing.count("<path") >= len(circuit)
    page = circuit.save(tmp_path / "circuit.html").read_text()
    for text in (page, drawing):
        loads_nothing(text)
    assert "svg" in ip.Circuit(graph=circuit.graph, edges=circuit.edges).svg()
