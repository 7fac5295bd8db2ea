"""Weights spread over processes: what is whole in each has its sites, and of what is not it says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interpose as ip
from interpose.models.transformer import TransformerModel
from tests.bounds import assert_near
from tests.models import tiny

TOKENS = torch.tensor([[3, 4, 5, 6]])
WHOLE = "embed resid_pre attn_out resid_mid mlp_out resid_post".split()
APART = [f"attn.hook_{kind}" for kind in ("q", "k", "v", "attn_scores", "pattern", "z", "result")]
APART += ["mlp.hook_pre", "mlp.hook_post"]


def parallel(module: Any, mesh: Any) -> Any:
    """Attention by heads and MLPs by neurons, as tensor-parallel plans have it."""
    plan: dict[str, Any] = {}
    for number in range(len(module.model.layers)):
        at = f"model.layers.{number}"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            plan[f"{at}.{name}_proj"] = ColwiseParallel()
        for name in ("self_attn.o", "mlp.down"):
            plan[f"{at}.{name}_proj"] = RowwiseParallel()
    return parallelize_module(module, mesh, plan)


@torch.no_grad()
def compared(processes: int) -> None:
    """Check a model that is spread over processes against one that is whole, in each of them."""
    bare, mesh = TransformerModel(tiny.build("llama")), init_device_mesh("cpu", (processes,))
    model = TransformerModel(parallel(tiny.build("llama"), mesh))
    kept = [name for name in bare.sites if name.rsplit("hook_", 1)[1] in WHOLE]
    assert len(kept) == 11
    assert set(kept) <= set(model.sites)
    for number in range(2):
        for kind in APART:
            with pytest.raises(ip.SiteNotFound, match=r"spread over processes .tensor parallel"):
                model.run_with_cache(TOKENS, names_filter=f"blocks.{number}.{kind}")
    _, wanted = bare.run_with_cache(TOKENS, names_filter=kept)
    _, found = model.run_with_cache(TOKENS, names_filter=kept)
    for name in kept:
        assert_near(found[name], wanted[name])
    edit = [ip.zero("attn_out", layer=0, pos=1)]
    edited = bare.run_with_hooks(TOKENS, hooks=edit)
    assert float((edited - bare(TOKENS)).abs().max()) > 1e-2
    assert_near(model.run_with_hooks(TOKENS, hooks=edit), edited)
    lenses = [ip.logit_lens(each, TOKENS, answer=5).values for each in (model, bare)]
    assert_near(*lenses)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of one, without a network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_the_stream_of_a_tensor_parallel_model_is_whole_and_its_heads_are_not_offered() -> None:
    compared(1)


def rank(number: int, file: str) -> None:
    """One of two processes."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=number, world_size=2)
    compared(2)
    dist.destroy_process_group()


def test_two_processes_with_half_of_the_heads_each_see_the_same_stream(tmp_path: Path) -> None:
    mp.spawn(rank, (str(tmp_path / "store"),), nprocs=2)


@pytest.mark.usefixtures("one_process")
def test_semantic_sites_of_sharded_models_say_what_to_do() -> None:
    module: Any = tiny.build("llama")
    _, expected = TransformerModel(tiny.build("llama")).run_with_cache(
        TOKENS, names_filter="model.layers.1"
    )
    mesh = init_device_mesh("cpu", (1,))
    for part in (*module.model.layers, module):
        fully_shard(part, mesh=mesh)
    model = TransformerModel(module)
    for ask in (
        lambda: model.sites,
        lambda: model.run_with_cache(TOKENS, names_filter=("resid_post", 0)),
        lambda: model.W_Q,
        lambda: ip.logit_lens(model, TOKENS, progress=False),
    ):
        with pytest.raises(ip.Unsupported, match=r"are sharded .FSDP.*module paths work.*tp_plan"):
            repr(ask())
    _, cache = model.run_with_cache(TOKENS, names_filter="model.layers.1")
    assert_near(cache["model.layers.1"], expected["model.layers.1"])
