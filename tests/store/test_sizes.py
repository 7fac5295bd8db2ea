"""What `ip.harvest_sizes` says by a config alone is what a harvest then takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import interpose as ip
from interpose.models.loading import skeleton
from interpose.store.sizes import COMMON, TFLOPS, shape_of
from tests.models import tiny


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("site", ["resid_post", "z", "post"])
def test_a_token_takes_what_it_is_said_to_take(name: str, site: str, tmp_path: Path) -> None:
    module = tiny.build(name)
    module.save_pretrained(tmp_path / "model")
    model = ip.wrap(module)
    assert isinstance(model, ip.TransformerModel)
    texts = torch.randint(3, 40, (20, 16))
    store = ip.harvest(
        model, texts, site, store=tmp_path / "s", dtype="float16", progress=False
    )  # fmt: skip
    said = ip.harvest_sizes(str(tmp_path / "model"), site, tokens=320, dtype="float16").sizes
    assert [one.layers for one in said] == [1, len(store.sites)]
    (per_layer,) = {one.nbytes for one in store.sites.values()}
    assert [one.token_bytes - 4 for one in said] == [per_layer, per_layer * len(store.sites)]
    payload = sum(
        (segment.folder / file).stat().st_size
        for segment in store.segments
        for file in segment.commit.files
        if file.startswith("blocks")
    )
    assert said[1].nbytes == pytest.approx(payload, rel=0.1)


def test_time_is_that_of_two_operations_for_each_weight_a_token_meets(tmp_path: Path) -> None:
    module = tiny.build("llama")
    module.save_pretrained(tmp_path / "model")
    shape = shape_of(str(tmp_path / "model"))
    tables = sum(
        p.numel() for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    )
    head = 0 if module.config.tie_word_embeddings else module.lm_head.weight.numel()
    assert shape.weights == sum(p.numel() for p in module.parameters()) - tables - head
    one, every = ip.harvest_sizes(str(tmp_path / "model"), tokens=3600, tflops=1, gpus=2).sizes
    assert one.hours == every.hours == pytest.approx(2 * shape.weights / 2e12)
    measured = ip.harvest_sizes("pocket", tokens=7200, speed=2.0).sizes[0]
    assert (measured.hours, measured.bound) == (1.0, "compute")
    slow = ip.harvest_sizes("pocket", tokens=3600, disk=388e-9).sizes[0]
    assert (slow.token_bytes, slow.bound) == (192 * 2 + 4, "disk")
    assert slow.hours == pytest.approx(1.0)


def test_no_weights_are_loaded() -> None:
    assert all(parameter.is_meta for parameter in skeleton("pocket").parameters())


def test_common_shapes_are_those_of_their_names() -> None:
    for shape in COMMON:
        size = float(shape.name[:-1]) * {"M": 1e6, "B": 1e9}[shape.name[-1]]
        assert shape.weights < size <= 1.5 * shape.weights  # the rest are embeddings
        assert shape.d_heads == shape.d_model
    said = ip.harvest_sizes()
    assert len(said.sizes) == 2 * len(COMMON)
    assert f"{TFLOPS:g} TFLOP/s" in repr(said)
    assert "8B" in said._repr_html_()


def test_what_a_config_does_not_tell_is_refused() -> None:
    with pytest.raises(ip.Unsupported, match="'pattern' is a kind of site whose width"):
        ip.harvest_sizes("pocket", "pattern")
    with pytest.raises(ip.Unsupported, match="'resid' is no kind of site"):
        ip.harvest_sizes(site="resid")
    with pytest.raises(ValueError, match="dtype is one of"):
        ip.harvest_sizes(dtype="float8")
    with pytest.raises(ValueError, match="are more than 0"):
        ip.harvest_sizes(tokens=0)
    with pytest.raises(FileNotFoundError, match=r"no folder './nothing'"):
        ip.harvest_sizes("./nothing")
