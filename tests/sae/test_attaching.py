"""Autoencoders in models: untouched when idle, moved by what an edit changes and nothing else, with true gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interpose as ip
from tests.bounds import assert_near
from tests.sae.oracles import KINDS, made

pytestmark = pytest.mark.bits
TEXT = "The Eiffel Tower is in"


@pytest.fixture(scope="module")
def pocket() -> Any:
    return ip.load("pocket")


@pytest.fixture
def model(pocket: Any) -> Iterator[Any]:
    yield pocket
    pocket.tree.offered = {}


def trained_like(kind: str, model: Any, site: Any, **options: Any) -> Any:
    """Random, but in the units of a site, so that some of its latents fire and some do not."""
    _, cache = model.run_with_cache(TEXT, names_filter=[site])
    x = cache[site].flatten(2)
    sae = made(kind, x.shape[-1], 64, **options)
    with torch.no_grad():
        sae.W_dec.mul_(x.std() / 4)
        if not sae.TIED:
            sae.W_enc.mul_(1 / x.norm(dim=-1).mean())
    return sae


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attached_and_not_edited_the_output_is_the_same_to_the_last_bit(
    kind: str, dtype: torch.dtype
) -> None:
    model = ip.load("pocket", dtype=dtype)
    plain = model(TEXT)
    sites = [("resid_post", 3), ("resid_mid", 2), ("z", 1), ("post", 4)]
    there = [trained_like(kind, model, site).attach(model, site) for site in sites]
    names = [name for one in there for name in (one.latents, one.recons, one.error)]
    read, cache = model.run_with_cache(TEXT, names_filter=names)
    assert torch.equal(read, plain)
    assert all(bool((cache[one.latents] != 0).any()) for one in there)
    for edits in (
        [ip.scale(name, 1.0) for name in names],
        [ip.add(one.latents, 0.0, neuron=5) for one in there],
        [(name, lambda value, hook: value.clone()) for name in names],
    ):
        assert torch.equal(model.run_with_hooks(TEXT, hooks=edits), plain)
    replaced = model.run_with_hooks(TEXT, hooks=[there[0].replace()])
    assert not torch.equal(replaced, plain)
    for one in there:
        one.detach()
    assert torch.equal(model(TEXT), plain)
    assert model.tree.offered == {}


@pytest.mark.parametrize("site", [("resid_post", 3), ("resid_mid", 2), ("z", 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_one_latent_moves_the_value_by_its_row_and_by_nothing_else(
    kind: str, site: Any, model: Any
) -> None:
    sae = trained_like(kind, model, site)
    there = sae.attach(model, site)
    _, before = model.run_with_cache(TEXT, names_filter=[there.latents, site])
    for edit, wanted in (
        (ip.fill(there.latents, 3.5, neuron=7), lambda code: torch.full_like(code, 3.5)),
        (ip.scale(there.latents, -2.0, neuron=7), lambda code: -2 * code),
        (ip.add(there.latents, 1.25, neuron=7), lambda code: code + 1.25),
        (ip.clamp(there.latents, min=0.5, max=0.75, neuron=7), lambda code: code.clamp(0.5, 0.75)),
    ):
        _, after = model.run_with_cache(TEXT, names_filter=[there.latents, site], hooks=[edit])
        was, now = before[there.latents], after[there.latents]
        expected = was.clone()
        expected[..., 7] = wanted(was[..., 7])
        assert torch.equal(now, expected), edit
        step = (now - was)[..., 7:8] * sae.rows[7]
        assert_near((after[site] - before[site]).flatten(2), step, before[site], after[site])
        still = (now == was).all(-1)
        assert torch.equal(after[site][still], before[site][still])


def test_positions_where_no_code_changed_keep_their_bits(model: Any) -> None:
    sae = trained_like("TopKSAE", model, ("resid_post", 3))
    there = sae.attach(model, ("resid_post", 3))
    _, before = model.run_with_cache(TEXT, names_filter=["resid_post"])
    edit = ip.fill(there.latents, 9.0, neuron=3, pos=2)
    _, after = model.run_with_cache(TEXT, names_filter=["resid_post"], hooks=[edit])
    kept = [0, 1, 3, 4]
    assert torch.equal(after["resid_post", 3][:, kept], before["resid_post", 3][:, kept])
    assert_near(
        after["resid_post", 3][:, 2], before["resid_post", 3][:, 2] + (9.0 - 0.0) * sae.rows[3], 9.0
    )


def test_without_its_error_the_model_goes_on_with_the_reconstruction(model: Any) -> None:
    site = ("resid_post", 3)
    sae = trained_like("JumpReLUSAE", model, site)
    there = sae.attach(model, site)

    def by_hand(value: Tensor) -> Tensor:
        return sae.decode(sae.encode(value), value)

    found = model.run_with_hooks(TEXT, hooks=[there.replace()])
    assert torch.equal(found, model.run_with_hooks(TEXT, fwd_hooks=[(site, by_hand)]))
    sparse = model.run_with_hooks(TEXT, fwd_hooks=[(site, lambda value, hook: sae(value))])
    assert_near(found, sparse, sparse)

    def edited(value: Tensor) -> Tensor:
        codes = sae.encode(value)
        codes[..., 9] += 2.0
        return sae.decode(codes)

    wanted = model.run_with_hooks(TEXT, fwd_hooks=[(site, edited)])
    more = ip.add(there.latents, 2.0, neuron=9)
    for hooks in ([there.replace(), more], [more, there.replace()]):
        assert_near(model.run_with_hooks(TEXT, hooks=hooks), wanted, wanted)


def test_edited_latents_are_read_as_they_were_set_and_not_encoded_anew(model: Any) -> None:
    there = trained_like("TopKSAE", model, ("resid_post", 3)).attach(model, ("resid_post", 3))
    edits = [ip.fill(there.latents, 4.0, neuron=1), ip.scale(there.latents, 2.0, neuron=1)]
    _, cache = model.run_with_cache(TEXT, names_filter=[there.latents], hooks=edits)
    assert bool((cache[there.latents][..., 1] == 8.0).all())
    later = ip.scale(
        ("resid_post", 3), 0.5
    )  # a value that others change afterwards is encoded anew
    _, cache = model.run_with_cache(
        TEXT, names_filter=[there.latents, ("resid_post", 3)], hooks=[*edits, later]
    )
    assert_near(cache[there.latents], there.sae.encode(cache["resid_post", 3]), 10.0)


def test_what_latents_are_given_is_a_site_too(model: Any) -> None:
    sae = trained_like("StandardSAE", model, ("resid_post", 3))
    there = sae.attach(model, ("resid_post", 3))
    edit = ip.add(there.pre, 3.0, neuron=2)
    _, before = model.run_with_cache(TEXT, names_filter=[there.pre, there.latents])
    _, after = model.run_with_cache(TEXT, names_filter=[there.pre, there.latents], hooks=[edit])
    assert_near(after[there.pre][..., 2], before[there.pre][..., 2] + 3.0)
    assert_near(after[there.latents], after[there.pre].relu())


def gradient_by_leaf(model: Any, sae: Any, site: Any, metric: Any) -> Tensor:
    """d(metric)/d(codes), where fresh codes take the place of those that the value has."""
    kept: list[Tensor] = []

    def put_in(value: Tensor) -> Tensor:
        codes = sae.encode(value).detach().requires_grad_()
        kept.append(codes)
        flat = value.flatten(2)
        return (flat + (sae.decode(codes, flat) - sae.decode(codes, flat).detach())).reshape(
            value.shape
        )

    metric(model.run_with_hooks(TEXT, fwd_hooks=[(site, put_in)])).backward()
    assert kept[0].grad is not None
    return kept[0].grad


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_at_latents_are_those_of_codes_put_in_their_place(kind: str, model: Any) -> None:
    site = ("resid_post", 3)
    sae = trained_like(kind, model, site)
    there = sae.attach(model, site)
    metric = lambda logits: logits[0, -1, 10] - logits[0, -1, 11]  # noqa: E731
    plain = model(TEXT)
    names = [there.latents, there.recons, there.error, site]
    logits, cache = model.run_with_cache(TEXT, names_filter=names, incl_bwd=metric)
    assert torch.equal(logits, plain)
    wanted = gradient_by_leaf(model, sae, site, metric)
    assert wanted.abs().max() > 1e-3
    assert_near(cache.grad[there.latents], wanted, wanted, times=4)
    alone = model.run_with_cache(TEXT, names_filter=[site], incl_bwd=metric)[1].grad[site]
    assert_near(cache.grad[there.recons], alone, alone, times=4)
    assert_near(cache.grad[there.error], alone, alone, times=4)


def test_a_small_change_of_a_latent_has_the_effect_that_its_gradient_says(model: Any) -> None:
    """Central differences on latents of two sites, one after the other, with edits in both."""
    low = trained_like("StandardSAE", model, ("resid_post", 1)).attach(model, ("resid_post", 1))
    high = trained_like("StandardSAE", model, ("resid_post", 4)).attach(model, ("resid_post", 4))
    metric = lambda logits: logits[0, -1, 10] - logits[0, -1, 11]  # noqa: E731
    _, cache = model.run_with_cache(TEXT, names_filter=[low.latents, high.latents], incl_bwd=metric)
    for there in (low, high):
        grad = cache.grad[there.latents]
        neuron = int(grad.abs().sum((0, 1)).argmax())
        size = 0.02
        up, down = (
            metric(model.run_with_hooks(TEXT, hooks=[ip.add(there.latents, by, neuron=neuron)]))
            for by in (size, -size)
        )
        slope, wanted = float((up - down).detach()) / (2 * size), float(grad[..., neuron].sum())
        assert abs(slope - wanted) < 0.02 * abs(wanted) + 1e-3, (slope, wanted)


def test_gradients_of_what_latents_are_given_are_asked_for_first(model: Any) -> None:
    there = trained_like("StandardSAE", model, ("resid_post", 3)).attach(model, ("resid_post", 3))
    metric = lambda logits: logits[0, -1, 10]  # noqa: E731
    _, cache = model.run_with_cache(TEXT, names_filter=[there.pre, there.latents], incl_bwd=metric)
    fires = cache[there.latents] > 0
    assert_near(cache.grad[there.pre], cache.grad[there.latents] * fires, 1.0)
    with pytest.raises(ip.GradientError, match="ask for its gradient first"):
        model.run_with_cache(TEXT, names_filter=[there.latents, there.pre], incl_bwd=metric)


def test_a_transcoder_reads_one_site_and_moves_another(model: Any) -> None:
    sae = made("TopKSAE", 192, 64, d_out=192, skip=True)
    there = sae.attach(model, ("mlp_in", 2), out=("mlp_out", 2), name="mlp")
    assert there.latents == "blocks.2.hook_mlp_out.mlp.latents"
    names = [("mlp_in", 2), ("mlp_out", 2), there.latents]
    plain, before = model.run_with_cache(TEXT, names_filter=names)
    assert_near(before[there.latents], sae.encode(before["mlp_in", 2]), before["mlp_in", 2])
    idle = model.run_with_hooks(TEXT, hooks=[ip.scale(there.latents, 1.0)])
    assert torch.equal(idle, plain)
    _, after = model.run_with_cache(
        TEXT, names_filter=names, hooks=[ip.add(there.latents, 2.0, neuron=3)]
    )
    step = after["mlp_out", 2] - before["mlp_out", 2]
    assert_near(step, (2.0 * sae.rows[3]).expand_as(step), before["mlp_out", 2], 2.0)
    _, after = model.run_with_cache(TEXT, names_filter=names, hooks=[there.replace()])
    assert_near(after["mlp_out", 2], sae(before["mlp_in", 2]), after["mlp_out", 2])
    earlier = ip.scale(
        ("resid_pre", 2), 0.5
    )  # what it reads is what the run has there, edits included
    _, after = model.run_with_cache(TEXT, names_filter=names, hooks=[earlier])
    assert_near(after[there.latents], sae.encode(after["mlp_in", 2]), after["mlp_in", 2])


def test_latents_are_sites_as_others_are_for_sweeps_attribution_ablation_and_examples(
    model: Any,
) -> None:
    site = ("resid_post", 3)
    sae = trained_like("TopKSAE", model, site)
    sae.attach(model, site)
    clean, corrupt = TEXT, "The Trevi Fountain is in"
    lead = ip.metrics.logit_difference(" Paris", " Rome")
    sweep = ip.sweep(
        model, clean, corrupt, site="sae.latents", over=("pos",), metric=lead, progress=False
    )
    _, kept = model.run_with_cache(clean, names_filter=["sae.latents"])
    for at, value in enumerate(sweep.values.flatten().tolist()):
        hooks = [ip.patch("sae.latents", kept, pos=at)]
        logits = model.run_with_hooks(corrupt, hooks=hooks)[0, -1]
        answer, instead = (model.to_single_token(word) for word in (" Paris", " Rome"))
        assert abs(value - float((logits[answer] - logits[instead]).detach())) < 1e-3
    found = ip.attribution_patching(
        model, clean, corrupt, metric=lead, site="sae.latents", over=("pos", "neuron"), rule="gradient",
        verify=4, progress=False,
    )  # fmt: skip
    assert tuple(found.values.shape) == (5, 64)
    assert all(place["agrees"] for place in found.verified)
    best = ip.max_activating(
        model, [clean, corrupt], site="sae.latents", layer=3, neuron=[5], k=1, progress=False
    )
    both = torch.stack(
        [
            model.run_with_cache(t, names_filter=["sae.latents"])[1]["sae.latents"][0]
            for t in (clean, corrupt)
        ]
    )
    assert_near(best.values.max(), both[..., 5].max(), both)
    fit = ip.probe(
        model,
        [clean, corrupt, "Rome is in", "Paris is in"],
        [1, 0, 1, 0],
        site="sae.latents",
        layer=3,
        pos=2,
        folds=2,
        progress=False,
    )
    assert fit is not None


def test_names_globs_and_short_forms_find_latents(model: Any) -> None:
    for layer in (1, 3):
        trained_like("TopKSAE", model, ("resid_post", layer)).attach(model, ("resid_post", layer))
    names = [f"blocks.{layer}.hook_resid_post.sae.latents" for layer in (1, 3)]
    for wanted in ("sae.latents", "**.sae.latents", "blocks.*.hook_resid_post.sae.latents"):
        assert list(model.sites.select(wanted)) == names
    assert list(model.sites.select(lambda name: name.endswith("latents"))) == names
    assert [site.canonical for site, _ in model.select(("sae.latents", 3))] == names[1:]
    assert [site.canonical for site, _ in model.select(("sae.latents", -4))] == names[1:]
    assert [site.canonical for site, _ in model.select(ip.at("sae.latents", layer=[1]))] == names[
        :1
    ]
    _, cache = model.run_with_cache(TEXT)
    assert not any("latents" in name for name in cache)
    assert "sae.latents" in repr(model.sites)
    with pytest.raises(ip.AmbiguousSite, match="is of 2 autoencoders"):
        model.hook_dict["sae.latents"]
    with pytest.raises(
        ip.SiteNotFound, match=r"did you mean 'blocks.3.hook_resid_post.sae.latents'"
    ):
        model.run_with_cache(TEXT, names_filter=["blocks.3.hook_resid_post.sae.latnets"])


def test_a_generation_is_steered_at_each_new_token_and_only_there(model: Any) -> None:
    site = ("resid_post", 3)
    sae = trained_like("TopKSAE", model, site)
    there = sae.attach(model, site)
    edit = ip.fill(there.latents, 25.0, neuron=6, phase="generated")
    with model.record([there.latents], hooks=[edit]) as cache:
        model.generate(TEXT, max_new_tokens=4, do_sample=False)
    values = cache[there.latents][0, :, 6]
    assert bool((values[5:] == 25.0).all())
    assert not bool((values[:5] == 25.0).any())
    assert len(values) > 6


def test_any_module_takes_one_at_any_of_its_values() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    model, x = ip.wrap(net), torch.randn(5, 4)
    sae = made("StandardSAE", 8, 20)
    with sae.attach(model, "0") as there:
        assert there.latents == "0.sae.latents"
        out, cache = model.run_with_cache(x, names_filter=["sae.latents"])
        assert torch.equal(out, net(x))
        assert cache["sae.latents"].shape == (5, 20)
        edited = model.run_with_hooks(x, hooks=[ip.add("sae.latents", 1.0, neuron=2)])
        assert_near(edited, net[2]((net[0](x) + sae.rows[2]).relu()), out, 2.0)
        assert list(model.sites.select("**.latents")) == ["0.sae.latents"]
    with pytest.raises(ip.SiteNotFound):
        model.run_with_cache(x, names_filter=["0.sae.latents"])
    assert model.tree.offered == {}


def test_a_part_that_is_called_twice_has_the_latents_of_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.part(x).relu())  # type: ignore[no-any-return]

    model, x = ip.wrap(Twice()), torch.randn(3, 4)
    sae = made("StandardSAE", 4, 20)
    sae.attach(model, "part")
    first = model.module.part(x)
    _, cache = model.run_with_cache(x, names_filter=["part.sae.latents#1", "part.sae.latents#0"])
    assert_near(cache["part.sae.latents#0"], sae.encode(first), 5.0)
    assert_near(cache["part.sae.latents#1"], sae.encode(model.module.part(first.relu())), 5.0)


def test_it_stays_attached_when_the_model_changes(model: Any) -> None:
    """Sites are found anew after a change, those of autoencoders too."""
    mine = ip.wrap(copy.deepcopy(model.module), tokenizer=model.tokenizer)
    sae = made("TopKSAE", 192, 64)
    there = sae.attach(mine, ("resid_post", 3))
    mine.run_with_cache(TEXT, names_filter=[there.latents])
    blocks = mine.module.transformer.h
    blocks[3] = copy.deepcopy(blocks[3])
    with torch.no_grad():
        blocks[3].mlp.c_proj.weight.mul_(2)
    _, cache = mine.run_with_cache(TEXT, names_filter=[there.latents, ("resid_post", 3)])
    assert_near(cache[there.latents], sae.encode(cache["resid_post", 3]), cache["resid_post", 3])


def test_an_autoencoder_finds_its_site_and_is_refused_where_it_does_not_fit(model: Any) -> None:
    about = {"hook_name": "blocks.3.hook_resid_post"}
    assert made("TopKSAE", 192, 64, about=about).attach(model).site == "blocks.3.hook_resid_post"
    with pytest.raises(ValueError, match=r"is an autoencoder called 'sae' at .* already"):
        made("TopKSAE", 192, 64, about=about).attach(model)
    by_path = {"hook_name": "somewhere.else", "hf_hook_name": "transformer.h.2"}
    assert made("TopKSAE", 192, 64, about=by_path).attach(model).site == "blocks.2.hook_resid_post"
    with pytest.raises(ip.EditShapeError, match=r"is of vectors of 100 features, and .* has 192"):
        made("TopKSAE", 100, 64, about=about).attach(model, name="other")
    model.run_with_cache(TEXT, names_filter=[("post", 1)])
    with pytest.raises(ip.EditShapeError, match=r"is of vectors of 192 features, and .* has 768"):
        made("TopKSAE", 192, 64).attach(model, ("post", 1), name="other")
    with pytest.raises(ip.SiteNotFound, match=r"says that it is of 'blocks.40.hook_resid_post'"):
        made("TopKSAE", 192, 64, about={"hook_name": "blocks.40.hook_resid_post"}).attach(model)
    with pytest.raises(ValueError, match="does not say which site it is of: give site="):
        made("TopKSAE", 192, 64).attach(model)
    with pytest.raises(ValueError, match="does not say which site it is of: give out="):
        made("TopKSAE", 192, 64, d_out=192).attach(model, ("mlp_in", 1))
    with pytest.raises(TypeError, match="writes what it reads"):
        made("TopKSAE", 192, 64).attach(model, ("mlp_in", 1), out=("mlp_out", 1))
    with pytest.raises(ip.Unsupported, match="several sites at once"):
        ip.CrossCoder(96, 8, site=["a", "b"]).attach(model, ("resid_post", 1))
    with pytest.raises(ValueError, match=r"one whole site; .* is 7 sites"):
        made("TopKSAE", 192, 64).attach(model, "resid_post")


def test_an_autoencoder_of_another_model_is_warned_about(model: Any) -> None:
    model.module.config._name_or_path = "gpt2"
    try:
        with pytest.warns(
            UserWarning, match="says that it is of 'pythia-70m', and this model is 'gpt2'"
        ):
            made("TopKSAE", 192, 64, about={"model_name": "pythia-70m"}).attach(
                model, ("resid_post", 1)
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made("TopKSAE", 192, 64, about={"model_name": "gpt2-small"}).attach(
                model, ("resid_post", 2)
            )
    finally:
        model.module.config._name_or_path = ""


def test_a_value_of_another_width_is_refused_when_it_comes_by() -> None:
    model = ip.wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
    made("StandardSAE", 6, 20).attach(model, "0")
    with pytest.raises(ip.EditShapeError, match=r"attached to '0', which is \(2, 8\)"):
        model.run_with_cache(torch.randn(2, 4), names_filter=["sae.latents"])
