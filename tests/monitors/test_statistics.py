import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import interpose as ip
from interpose.monitors.statistics import Statistics, activation_statistics


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 3))


def outputs(module: nn.Module, part: nn.Module, batches) -> torch.Tensor:
    """All that a module returns, by a raw hook."""
    kept = []
    handle = part.register_forward_hook(lambda _, args, out: kept.append(out.detach().double()))
    with torch.no_grad():
        for batch in batches:
            module(batch)
    handle.remove()
    return torch.cat(kept)


def test_batches_add_up_to_the_statistics_of_all_data():
    module = net().eval()
    model, x = ip.wrap(module), torch.randn(1000, 5) * 3 + 100
    found = activation_statistics(model, x.split(37), progress=False)
    assert [row.site for row in found.rows] == ["0", "1", "2", "3", "output"]
    for name, part in (("0", module[0]), ("1", module[1]), ("3", module[3])):
        whole, row = outputs(module, part, x.split(37)), found[name]
        assert row.count == 1000
        torch.testing.assert_close(row.mean, whole.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(row.variance, whole.var(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(row.std, whole.std(0), rtol=1e-10, atol=1e-12)
        assert torch.equal(row.minimum, whole.amin(0))
        assert torch.equal(row.maximum, whole.amax(0))
        assert torch.equal(row.sparsity, (whole == 0).double().mean(0))
        mean, std = row.overall()
        assert mean == pytest.approx(float(whole.mean()), rel=1e-12)
        assert std == pytest.approx(float(whole.std()), rel=1e-10)


def test_merging_two_halves_equals_one_pass():
    model, x = ip.wrap(net().double().eval()), torch.randn(200, 5, dtype=torch.float64)
    parts = [Statistics("1") for _ in range(3)]
    for statistics, rows in zip(parts, (x, x[:30], x[30:])):
        model.run_with_hooks(rows, hooks=[statistics])
    whole, first, second = parts
    first.merge(second)
    for name in ("mean", "variance", "minimum", "maximum", "sparsity"):
        merged, direct = getattr(first.result()["1"], name), getattr(whole.result()["1"], name)
        torch.testing.assert_close(merged, direct, rtol=1e-12, atol=1e-14)
    assert first.result()["1"].count == 200


def test_merging_adds_sites_that_only_the_other_one_saw():
    model, x = ip.wrap(net().eval()), torch.randn(4, 5)
    one, other = Statistics("0"), Statistics("3")
    model.run_with_hooks(x, hooks=[one, other])
    one.merge(other)
    assert [row.site for row in one.result().rows] == ["0", "3"]


def test_the_variance_survives_a_mean_that_is_far_larger():
    model = ip.wrap(nn.Identity())
    x = torch.randn(4000, 2, dtype=torch.float64) + 1e8
    found = activation_statistics(model, x.split(100), progress=False)
    torch.testing.assert_close(found["output"].variance, x.var(0), rtol=1e-7, atol=0.0)


def test_half_precision_values_are_summed_in_float64():
    x = torch.full((3000, 1), 1000.0, dtype=torch.float16)
    found = activation_statistics(ip.wrap(nn.Identity()), [x], progress=False)
    assert found["output"].mean.tolist() == [1000.0]
    assert found["output"].variance.tolist() == [0.0]


def test_dead_units_are_those_that_never_fire():
    module = net()
    with torch.no_grad():
        module[0].bias[2] = -1e6
    found = activation_statistics(ip.wrap(module), torch.randn(50, 10, 5), "1", progress=False)
    assert found["1"].dead.tolist() == [unit == 2 for unit in range(7)]
    assert found["1"].sparsity[2] == 1
    assert found["1"].count == 500


def test_channels_are_units_with_unit_axis_1():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    x = torch.randn(6, 3, 8, 8)
    found = activation_statistics(ip.wrap(module), [x], ["0", "2"], unit_axis=1, progress=False)
    whole = outputs(module, module[0], [x]).movedim(1, -1).reshape(-1, 4)
    torch.testing.assert_close(found["0"].variance, whole.var(0), rtol=1e-10, atol=0.0)
    assert (found["0"].count, found["0"].units) == (6 * 36, 4)
    assert found["2"].units == 2


def test_an_axis_that_a_value_does_not_have_is_an_error():
    statistics = Statistics("0", unit_axis=2)
    with pytest.raises(ValueError) as caught:
        ip.wrap(net()).run_with_hooks(torch.randn(4, 5), hooks=[statistics])
    assert str(caught.value) == (
        "unit_axis=2 is not an axis of '0', whose shape is (4, 7). "
        "Choose another unit_axis, or other sites."
    )


def test_an_axis_that_changes_its_length_is_an_error():
    with pytest.raises(ValueError) as caught:
        activation_statistics(
            ip.wrap(nn.Identity()), [torch.randn(2, 3), torch.randn(2, 4)], progress=False
        )
    assert str(caught.value) == (
        "'output' had 3 units and now has 4. Choose the unit_axis whose length stays the same."
    )


def test_one_number_is_one_unit_and_one_sample_has_no_variance():
    class Total(nn.Module):
        def forward(self, x):
            return x.sum()

    found = activation_statistics(ip.wrap(Total()), [torch.ones(3)], progress=False)
    assert (found["output"].count, found["output"].units) == (1, 1)
    assert found["output"].variance.isnan().all()


def test_batches_may_be_tuples_dictionaries_or_what_forward_makes_of_them():
    class Add(nn.Module):
        def forward(self, left, right=0.0):
            return left + right

    model, x = ip.wrap(Add()), torch.arange(6.0).reshape(3, 2)
    loader = DataLoader(TensorDataset(x, torch.zeros(3)), batch_size=2)
    assert activation_statistics(model, loader, progress=False)["output"].mean.tolist() == [2, 3]
    named = [{"left": x, "right": 1.0}]
    assert activation_statistics(model, named, progress=False)["output"].mean.tolist() == [3, 4]
    own = activation_statistics(
        model, [(x, x)], forward=lambda model, batch: model(batch[0], batch[1]), progress=False
    )
    assert own["output"].mean.tolist() == [4, 6]


def test_each_module_is_put_back_in_its_own_mode():
    module = net().train()
    module[2].eval()
    seen = []
    module[2].register_forward_hook(
        lambda m, args, out: seen.append((m.training, out.requires_grad))
    )
    activation_statistics(ip.wrap(module), [torch.randn(4, 5)], progress=False)
    assert seen == [(False, False)]
    assert [m.training for m in module] == [True, True, False, True]
    with pytest.raises(RuntimeError):
        activation_statistics(ip.wrap(module), [torch.randn(4, 6)], progress=False)
    assert [m.training for m in module] == [True, True, False, True]


def test_an_empty_loader_is_an_error():
    with pytest.raises(ip.NeverFired):
        activation_statistics(ip.wrap(net()), [], progress=False)


def test_the_result_prints_shows_and_saves_itself(tmp_path):
    model = ip.wrap(nn.Sequential(nn.ReLU()))
    found = activation_statistics(
        model, [torch.tensor([[1.0, -2.0], [3.0, 0.0]])], "0", progress=False
    )
    assert repr(found) == (
        "Activation statistics of 1 sites\n"
        "site  units  samples  mean  std    min  max  zeros  dead\n"
        "0     2      2        1     1.414  0    3    50.0%  1"
    )
    assert "<td" in found._repr_html_()
    page = found.save(tmp_path / "x.html").read_text()
    assert page.startswith("<!doctype html>")
    assert f"<h1>{found.title}</h1>" in page
    saved = json.loads(found.save(tmp_path / "x.json").read_text())
    assert saved == found.to_dict()
    assert saved["rows"][0]["mean"]["tensor"] == [2.0, 0.0]
    assert saved["rows"][0]["dead"]["tensor"] == [False, True]
    with pytest.raises(ValueError, match=r"^save writes .html, .*got 'x.txt'.$"):
        found.save("x.txt")


def test_a_site_that_was_not_looked_at_is_named_in_the_error():
    found = activation_statistics(ip.wrap(net()), [torch.randn(2, 5)], ["0", "1"], progress=False)
    with pytest.raises(ip.SiteNotFound) as caught:
        found["9"]
    assert str(caught.value) == "no statistics of '9'. There are: '0', '1'."


def test_the_bar_is_silent_without_a_terminal(capsys):
    activation_statistics(ip.wrap(net()), [torch.randn(2, 5)])
    assert capsys.readouterr() == ("", "")


def test_units_of_a_text_are_all_that_a_token_has_and_padding_is_no_sample():
    model = ip.load("pocket")
    texts = ["The Eiffel Tower is in", "Hello"]
    found = activation_statistics(model, [texts], ["z", "resid_post"], progress=False)
    with torch.no_grad():
        caches = [model.run_with_cache(text, names_filter=["z", "resid_post"])[1] for text in texts]
    tokens = sum(len(model.to_str_tokens(text)) for text in texts)
    for kind, name in (("z", "attn.hook_z"), ("resid_post", "hook_resid_post")):
        whole = torch.cat([cache[kind, 3][0].flatten(1) for cache in caches]).double()
        row = found[f"blocks.3.{name}"]
        assert (row.count, row.units) == (tokens, 192)
        torch.testing.assert_close(row.mean, whole.mean(0), atol=1e-5, rtol=1e-4)
    text = texts[0]
    edited = model.run_with_hooks(text, hooks=[ip.mean("z", found, layer=3)])
    mean = found["blocks.3.attn.hook_z"].mean.float().reshape(6, 32)
    filled = model.run_with_hooks(text, fwd_hooks=[(("z", 3), lambda z, hook: z * 0 + mean)])
    torch.testing.assert_close(edited, filled)
    assert (edited - model(text)).abs().max() > 0.1
