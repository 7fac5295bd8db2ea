"""A model that two processes hold together: whole values are those of the model in one process, parts are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from tests.bounds import assert_near
from tests.models import tiny
from tests.models.spread_model import TOKENS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of the processes saw, and the model in this one."""
    folder = tmp_path_factory.mktemp("spread")
    module = tiny.build("llama")
    module.save_pretrained(folder / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.models.spread_model", str(rank), str(folder)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=240)[0] for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert [one.returncode for one in running] == [0, 0], "\n".join(said)
    return [*(torch.load(folder / f"{rank}.pt") for rank in range(2)), ip.wrap(module)]


def test_whole_values_are_those_of_the_model_in_one_process(found: list[Any]) -> None:
    first, second, model = found
    assert first["spread"]
    wanted, cache = model.run_with_cache(TOKENS)
    assert {f"blocks.{layer}.hook_resid_{at}" for layer in (0, 1) for at in ("pre", "mid", "post")} <= set(
        first["cache"]
    )  # fmt: skip
    for name, value in first["cache"].items():
        assert_near(value, cache[name])
        assert_near(value, second["cache"][name])
    assert_near(first["logits"], wanted)


def test_edits_of_whole_values_do_what_they_do_in_one_process(found: list[Any]) -> None:
    first, second, model = found
    edits = [ip.scale("resid_post", 0.5, layer=0), ip.zero("mlp_out", layer=1)]
    wanted = model.run_with_hooks(TOKENS, hooks=edits)
    assert not torch.allclose(wanted, model(TOKENS), atol=1e-2)
    for one in (first, second):
        assert_near(one["edited"], wanted)


def test_parts_are_refused_by_any_name_and_nothing_else_is_missing(found: list[Any]) -> None:
    first, second, model = found
    assert first["partial"] == second["partial"]
    parts = {tuple(one) for one in first["partial"]}
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert {(f"{attention}.{name}_proj", "output") for name in "qkv"} <= parts
    assert {(f"{attention}.o_proj", "input"), (f"{mlp}.down_proj", "input")} <= parts
    assert {(f"{mlp}.act_fn", "output"), (f"{mlp}.up_proj", "output")} <= parts
    assert not any(path.count(".") < 4 for path, _ in parts)  # blocks, the ends, norms
    assert (f"{attention}.o_proj", "output") not in parts
    missing = {
        name.split(".hook_")[-1]
        for name in set(model.run_with_cache(TOKENS)[1]) - set(first["cache"])
    }
    assert missing <= {
        "q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "pre", "pre_linear", "post",
    }  # fmt: skip
    assert {"z", "q", "pattern", "post"} <= missing
    refused = first["refused"]
    assert refused["z"].startswith("SiteNotFound: LlamaForCausalLM has no")
    for name in ("z", "path", "edit"):
        assert "its weights are spread over processes (tensor parallel)" in refused[name]
    assert refused["path"].startswith(
        "Unsupported: 'model.layers.0.self_attn.q_proj' cannot be hooked"
    )


def test_what_looks_at_weights_or_writes_or_plans_by_memory_is_refused(found: list[Any]) -> None:
    first, _, model = found
    refused = first["refused"]
    assert "spread over devices" in refused["weights"]
    for name, what in {
        "check": "model.check()",
        "harvest": "a harvest",
        "sweep": "a sweep",
    }.items():
        assert refused[name].startswith(
            f"Unsupported: {what} does not run on a model that is spread"
        )
        assert "device_map='auto'" in refused[name]
    assert first["cfg"] == (model.cfg.n_heads, model.cfg.n_key_value_heads, model.cfg.d_model)


def test_other_models_are_not_measured() -> None:
    model = ip.wrap(tiny.build("gpt2"))
    runs: list[Any] = []
    model.module.register_forward_hook(lambda *call: runs.append(call))
    assert model.partial == frozenset()
    assert runs == []
