"""Probes: raw hooks for features and textbook algebra for fits must give the same; nothing of held-out data leaks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import interpose as ip
from interpose.methods.linear_fits import Task, fitted, predicted
from interpose.methods.probes import Probe, ProbeScores, probe
from tests.leftovers import same_state, state_of
from tests.models import tiny
from tests.pages import loads_nothing
from tests.sweeps.oracle import blocks

TYPES = ["gpt2", "llama", "gemma2", "gpt_neox"]


def planted(count: int = 120, seed: int = 0) -> tuple[Tensor, list[str]]:
    """Random tokens [count, 6]; the one at position 2 is one of four words, of two classes."""
    draw = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(10, 60, (count, 6), generator=draw, device="cpu")
    words = torch.randint(0, 4, (count,), generator=draw, device="cpu")
    tokens[:, 2] = 60 + words
    return tokens, ["odd" if word % 2 else "even" for word in words.tolist()]


def streams(module: Any, tokens: Tensor, pos: int) -> Tensor:
    """What leaves each block at a position, [layer, example, unit] in float64, by raw hooks."""
    found: list[Tensor] = []

    def keep(_: Any, args: Any, output: Any) -> None:
        value = output if isinstance(output, Tensor) else output[0]
        found.append(value[:, pos].detach().double())

    handles = [block.register_forward_hook(keep) for block in blocks(module)]
    with torch.no_grad():
        module(tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(found)


def textbook(x: Tensor, y: Tensor, strength: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ridge of standardised features as a least-squares problem with rows for the penalty: mean, std, W, b."""
    mean, std = x.mean(0), x.std(0, unbiased=False)
    z, n = (x - mean) / std, len(x)
    penalty = strength**0.5 * torch.eye(z.shape[1], dtype=z.dtype)
    stacked = torch.cat([z / n**0.5, penalty])
    wanted = torch.cat([(y - y.mean(0)) / n**0.5, y.new_zeros(z.shape[1], y.shape[1])])
    return mean, std, torch.linalg.lstsq(stacked, wanted, driver="gelsd").solution, y.mean(0)


@pytest.mark.parametrize("name", TYPES)
def test_ridge_reads_what_the_textbook_reads_of_raw_hooks_features(name: str) -> None:
    module = tiny.build(name, layers=3)
    tokens, labels = planted(60)
    x = streams(module, tokens, 2)
    found = probe(ip.wrap(module), tokens, labels, pos=2, strength=0.1, batch_size=7)
    y = torch.tensor([[label == "even", label == "odd"] for label in labels]).double()
    for layer in range(3):
        for fold in range(5):
            train, test = found.folds != fold, found.folds == fold
            mean, std, weight, bias = textbook(x[layer, train], y[train], 0.1)
            scores = (x[layer, test] - mean) / std @ weight + bias
            assert scores.diff().abs().min() > 1e-4
            assert torch.equal(scores.argmax(-1), found.predictions[layer, test])
        mean, std, weight, bias = textbook(x[layer], y, 0.1)
        margin = ((x[layer] - mean) / std @ weight + bias).diff()[:, 0]
        torch.testing.assert_close(found.probes[layer](x[layer]), margin, rtol=1e-4, atol=1e-4)
    assert found.at(measure="accuracy", layer=0) == 1.0


@pytest.mark.parametrize("kind", ["ridge", "logistic", "difference_of_means"])
def test_a_planted_label_is_read_and_the_control_task_is_not(kind: str) -> None:
    tokens, labels = planted(160)
    module = tiny.build("gpt2")
    model = ip.wrap(module)
    before = state_of(module)
    found = probe(model, tokens, labels, pos=2, kind=kind, layer=[1], strength=0.1)
    assert same_state(before, state_of(module))
    assert all(value.grad is None for value in module.parameters())
    assert found.at(measure="accuracy", layer=1) > 0.9
    assert found.at(measure="balanced", layer=1) > 0.9
    assert abs(found.at(measure="control", layer=1) - 0.5) < 0.13
    assert found.at(measure="selectivity", layer=1) > 0.35
    assert found.predictions.shape == (1, 160)
    again = probe(model, tokens, labels, pos=2, kind=kind, layer=[1], strength=0.1)
    assert torch.equal(found.values, again.values)
    assert torch.equal(found.weights, again.weights)


def test_the_control_task_shows_what_memorising_types_reaches() -> None:
    tokens, labels = planted()
    found = probe(
        ip.wrap(tiny.build("gpt2")), tokens, labels, pos=2, types=tokens[:, 2].tolist(), layer=[0]
    )
    assert found.at(measure="control", layer=0) == 1.0  # four words are easy to learn by heart


def test_a_feature_that_only_names_the_group_is_at_chance_on_other_groups() -> None:
    draw = torch.Generator("cpu").manual_seed(0)
    groups = torch.arange(40).repeat_interleave(4)
    labels = torch.randint(0, 2, (40,), generator=draw, device="cpu")[groups]
    names = torch.randperm(40, generator=draw, device="cpu")[groups]
    tokens = torch.randint(10, 60, (160, 4), generator=draw, device="cpu")
    tokens[:, 1] = 10 + names
    model = ip.wrap(tiny.build("gpt2"))
    options: Any = {"pos": 1, "layer": [0], "control": False, "strength": 1e-4}
    mixed = probe(model, tokens, labels, **options)
    apart = probe(model, tokens, labels, groups=groups.tolist(), **options)
    for fold in range(5):
        held = set(groups[apart.folds == fold].tolist())
        assert held.isdisjoint(groups[apart.folds != fold].tolist())
    assert mixed.at(measure="accuracy", layer=0) > 0.85
    assert abs(apart.at(measure="accuracy", layer=0) - 0.5) < 0.2


@pytest.mark.parametrize("kind", ["ridge", "logistic", "difference_of_means"])
def test_nothing_of_held_out_examples_enters_a_fit(kind: str) -> None:
    x = torch.randn(1, 40, 5)
    y = (x[0, :, 0] > 0).long()
    task = Task(target=y, classes=[0, 1], fold_of=torch.arange(40) % 4, folds=4)
    wild = x.clone()
    wild[:, task.fold_of == 2] = wild[:, task.fold_of == 2] * 1e6 + 1e6

    def fits(features: Tensor) -> Any:
        data = [(torch.arange(k, 40, 3), features[:, k::3]) for k in range(3)]
        return fitted(lambda: data, [task], kind, 0.1)[0]

    assert all(torch.equal(a, b) for a, b in zip(fits(x)[2], fits(wild)[2]))
    assert not torch.equal(fits(x)[1][0], fits(wild)[1][0])


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_is_where_plain_newton_steps_end(classes: int) -> None:
    x = torch.randn(1, 80, 4).double() * torch.tensor([1.0, 5.0, 0.2, 1.0]) + 3
    y = (x[0, :, :classes] + torch.randn(80, classes)).argmax(-1)
    task = Task(target=y, classes=list(range(classes)), fold_of=torch.arange(80) % 2, folds=2)
    data = [(torch.arange(80), x)]
    weight, bias = fitted(lambda: data, [task], "logistic", 0.05)[0][-1]
    mean, std = x[0].mean(0), x[0].std(0, unbiased=False)
    z = torch.cat([(x[0] - mean) / std, torch.ones(80, 1)], 1).double()

    def loss(flat: Tensor) -> Tensor:
        rows = flat.reshape(classes, 5)
        fit = torch.nn.functional.cross_entropy(z @ rows.T, y)
        return fit + 0.025 * rows[:, :4].square().sum() + 1e-9 * rows[:, 4].square().sum()

    point = torch.zeros(classes * 5, dtype=torch.float64)
    for _ in range(30):
        slope = torch.autograd.functional.jacobian(loss, point)
        curve = torch.autograd.functional.hessian(loss, point)
        point = point - torch.linalg.solve(curve, slope)
    rows = point.reshape(classes, 5)
    expected = rows[1:, :4] - rows[:1, :4]
    got = (weight[0] if classes == 2 else weight[0, 1:] - weight[0, :1]) * std
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    scores = (x[0] @ weight[0].T + bias[0]).softmax(-1) if classes > 2 else None
    if scores is not None:
        torch.testing.assert_close(scores, (z @ rows.T).softmax(-1), rtol=1e-3, atol=1e-3)


def test_numbers_are_read_with_r2_on_held_out_examples() -> None:
    tokens, _ = planted(150)
    module = tiny.build("llama")
    direction = torch.randn(streams(module, tokens[:1], 4).shape[-1]).double()
    numbers = (
        streams(module, tokens, 4)[1] @ direction
    ).tolist()  # a number that layer 1 has linearly
    found = probe(ip.wrap(module), tokens, numbers, pos=4, strength=1e-6)
    assert list(found.axes["measure"]) == ["r2", "control", "selectivity"]
    assert found.at(measure="r2", layer=1) > 0.999
    assert found.at(measure="control", layer=1) < 0.2
    mean = torch.tensor(numbers).double()
    usual = torch.stack([mean[found.folds != fold].mean() for fold in range(5)])[found.folds]
    r2 = 1 - (found.predictions[1] - mean).square().sum() / (mean - usual).square().sum()
    torch.testing.assert_close(found.values[0, 1], r2)


def test_sums_over_a_stream_give_what_kept_features_give() -> None:
    tokens, labels = planted(60)
    model = ip.wrap(tiny.build("gpt2"))
    for kind in ("ridge", "difference_of_means"):
        kept, streamed = (
            probe(model, tokens, labels, pos=2, kind=kind, stream=stream, batch_size=9)
            for stream in (False, True)
        )
        assert torch.equal(kept.values, streamed.values)
        assert torch.equal(kept.weights, streamed.weights)
        assert streamed.protocol["forwards"] == 2 * kept.protocol["forwards"]


def test_the_difference_of_means_is_that_and_moves_one_class_to_the_other() -> None:
    tokens, labels = planted(80)
    module = tiny.build("gpt2")
    model = ip.wrap(module)
    found = probe(model, tokens, labels, pos=2, kind="difference_of_means", layer=[0, 1])
    odd = torch.tensor([label == "odd" for label in labels])
    x = streams(module, tokens, 2)[0]
    apart = x[odd].mean(0) - x[~odd].mean(0)
    torch.testing.assert_close(found.probes[0].direction, apart, rtol=1e-5, atol=1e-6)
    steer = ip.add("resid_post", found.probes[0].direction, layer=0, pos=2)
    _, cache = model.run_with_cache(tokens[~odd], names_filter=("resid_post", 0), hooks=[steer])
    before = found.probes[0].predict(x[~odd]).double().mean()
    after = found.probes[0].predict(cache["resid_post", 0][:, 2]).double().mean()
    assert before < 0.05
    assert after > 0.9


def test_positions_may_be_one_for_each_text_or_a_text() -> None:
    model = ip.load("pocket")
    texts = [
        f"The {a} near the {b}" for a in ("dogs", "key", "cars", "tree") for b in ("bird", "doors")
    ]
    labels = [text.split()[1].endswith("s") for text in texts]
    options: Any = {"layer": [2, 5], "folds": 2}
    at_two = probe(model, texts, labels, pos=2, **options)
    for pos in ([2] * 8, [-3] * 8, " near"):
        assert torch.equal(probe(model, texts, labels, pos=pos, **options).weights, at_two.weights)
    head = probe(model, texts, labels, site="z", head=3, **options)
    assert head.best.direction.shape == (model.cfg.d_head,)
    ip.add("z", head.best.direction, layer=head.best.layer, head=3)


def test_a_probe_is_saved_whole_and_read_again(tmp_path: Any) -> None:
    tokens, labels = planted(60)
    model = ip.wrap(tiny.build("gpt2"))
    three = [["a", "b", "c"][n % 3] for n in range(60)]
    for given in (labels, three):
        found = probe(model, tokens, given, pos=2, layer=[1], control=False)
        path = found.best.save(tmp_path / "probe.safetensors")
        loaded = ip.Probe.load(path)
        values = torch.randn(4, model.cfg.d_model)
        assert torch.equal(loaded(values), found.best(values))
        assert torch.equal(loaded.predict(values), found.best.predict(values))
        assert (repr(loaded), loaded.classes) == (repr(found.best), found.best.classes)
        assert [file.name for file in tmp_path.iterdir()] == ["probe.safetensors"]
        again = ProbeScores.from_dict(json.loads(json.dumps(found.to_dict())))
        assert torch.equal(again.probes[1].weight, found.probes[1].weight)
    html = found.html()
    loads_nothing(html)
    assert isinstance(loaded, Probe)
    (tmp_path / "other.safetensors").write_bytes(
        path.read_bytes().replace(b"interpose.Probe", b"interpose.Prob3")
    )
    with pytest.raises(
        ValueError, match=r"is not a result that interpose wrote: its format is 'interpose.Prob3'"
    ):
        Probe.load(tmp_path / "other.safetensors")


def test_the_number_of_the_subject_can_be_read_and_taken_out_in_pocket() -> None:
    model = ip.load("pocket")
    nouns = ["key", "dog", "picture", "door", "student", "car", "table", "tree", "bird", "lamp"]
    texts, labels, groups = [], [], []
    for at, noun in enumerate(nouns):
        for plural in (False, True):
            for other in (nouns[(at + 3) % 10], nouns[(at + 4) % 10] + "s"):
                texts.append(f"The {noun}{'s' * plural} near the {other}")
                labels.append("plural" if plural else "singular")
                groups.append(noun)
    found = ip.probe(
        model, texts, labels, groups=groups, kind="difference_of_means", layer=[0, 4, 6]
    )
    assert found.at(measure="accuracy", layer=4) > 0.95
    assert found.at(measure="accuracy", layer=0) < 0.75  # the last word misleads
    assert found.at(measure="selectivity", layer=4) > 0.25
    erase = ip.project_out("resid_post", found.probes[4].direction, layer=4, pos=-1)
    _, cache = model.run_with_cache(texts, names_filter=("resid_post", 4), hooks=[erase])
    assert found.probes[4](cache["resid_post", 4][:, -1]).std() < 1e-3


def test_wrong_arguments_are_refused_with_what_is_there() -> None:
    tokens, labels = planted(12)
    model = ip.wrap(tiny.build("gpt2"))
    numbers = [float(n) for n in range(12)]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (labels, {"kind": "svm"}, "kind is 'ridge', 'logistic', 'difference_of_means'; got 'svm'"),
        (labels, {"strength": 0.0}, "strength is above 0"),
        (labels, {"kind": "logistic", "stream": True}, "needs all features at once"),
        (labels[:3], {}, "3 labels for 12 texts"),
        (["a"] * 12, {}, "all labels are 'a'"),
        (numbers, {"kind": "logistic"}, "for numbers use kind='ridge'"),
        (labels, {"groups": [1, 2]}, "2 groups for 12 texts"),
        (labels, {"groups": [1, 2] * 6}, "folds=5 with 2 groups"),
        (labels, {"site": "z"}, "Say which head: head=0"),
        (labels, {"site": "pattern"}, "Choose another site"),
        (labels, {"pos": [1, 2]}, "2 positions for 12 texts"),
        (["a", *["b"] * 11], {}, "all examples of class 'a' are held out together"),
    ]
    for given, options, message in cases:
        with pytest.raises(ValueError, match=message):
            probe(model, tokens, given, **options)


def test_each_example_is_read_by_a_fit_that_did_not_see_it() -> None:
    x = torch.randn(2, 30, 3)
    task = Task(
        target=torch.randn(30).double(), classes=None, fold_of=torch.arange(30) % 3, folds=3
    )
    data = [(torch.arange(30), x)]
    fits = fitted(lambda: data, [task], "ridge", 0.1)
    (found,) = predicted(lambda: data, [task], fits)
    for number in range(30):
        weight, bias = fits[0][number % 3]
        expected = (x[:, number].double()[:, None] @ weight.mT)[:, 0, 0] + bias[:, 0]
        torch.testing.assert_close(found[:, number], expected)


def test_a_position_that_a_text_lacks_is_an_error() -> None:
    tokens, labels = planted(12)
    model = ip.wrap(tiny.build("gpt2"))
    last = [probe(model, tokens, labels, pos=[pos] * 12, folds=2).weights for pos in (-1, 5)]
    assert torch.equal(*last)
    for pos in (6, -7):
        with pytest.raises(IndexError, match=f"position {pos} of text 3, with 6 tokens"):
            probe(model, tokens, labels, pos=[0, 1, 2, pos, *range(6), 0, 1], folds=2)


def test_equal_texts_are_held_out_together_and_positions_of_one_text_are_not() -> None:
    tokens, labels = planted(20)
    model = ip.wrap(tiny.build("gpt2"))
    folds = probe(model, tokens.repeat(3, 1), labels * 3, pos=2, layer=[0]).folds
    assert torch.equal(folds, folds[:20].repeat(3))
    length = 30
    text = torch.randint(10, 60, (1, length), generator=torch.Generator().manual_seed(0))
    words = ["odd" if token % 2 else "even" for token in text[0].tolist()]
    found = probe(model, text.expand(length, -1), words, pos=list(range(length)), layer=[0])
    assert len(found.folds.unique()) == 5
    assert found.at(measure="control", layer=0) < 0.9  # types are positions: there is no one label


def test_labels_of_numpy_are_those_of_python() -> None:
    tokens, _ = planted(20)
    model = ip.wrap(tiny.build("gpt2"))
    numbers = torch.linspace(-1, 1, 20)
    for given in (numbers, numbers.numpy(), (numbers > 0).numpy(), (numbers > 0).long().numpy()):
        one, other = (probe(model, tokens, some, layer=[-1]) for some in (given, given.tolist()))
        assert torch.equal(one.values, other.values)
        assert one.classes == other.classes
        assert json.dumps(one.classes) == json.dumps(other.classes)
        assert one.axes["layer"] == [len(model.blocks) - 1]


def test_labels_that_say_nothing_are_refused() -> None:
    tokens, _ = planted(12)
    model = ip.wrap(tiny.build("gpt2"))
    with pytest.raises(ValueError, match=r"all labels are 1.0: there is nothing to tell apart"):
        probe(model, tokens, [1.0] * 12)
    with pytest.raises(ValueError, match="labels that are numbers are finite"):
        probe(model, tokens, [float("nan"), *range(11)])


def test_by_default_probes_read_in_all_layers_that_have_the_site() -> None:
    tokens, labels = planted(12)
    found = probe(ip.wrap(tiny.build("jamba", layers=4)), tokens, labels, site="z", head=0, folds=2)
    assert found.axes["layer"] == [0, 2]


def test_groups_may_be_a_tensor_or_an_array() -> None:
    tokens, labels = planted(24)
    groups = torch.arange(24) // 4
    model = ip.wrap(tiny.build("gpt2"))
    found = [
        probe(model, tokens, labels, groups=some, layer=[0], folds=3)
        for some in (groups.tolist(), groups, groups.numpy())
    ]
    assert found[0].protocol["groups"] == 6
    for one in found:
        assert torch.equal(one.folds, found[0].folds)
        assert one.protocol == found[0].protocol
        assert torch.equal(one.values, found[0].values)
