"""Names and arguments of `from_pretrained`, and where code imports from. Numbers are those of TransformerLens 3.5.1."""

from __future__ import annotations

import copy
import importlib
import types
from typing import Any

import pytest
import torch

import interpose.dialects.transformer_lens as tl
from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.dialects.transformer_lens.loading.nicknames import on_hub, own_file, revision
from interpose.errors import Unsupported
from interpose.models import loading
from tests.dialects.transformer_lens.test_padding import TOKENIZERS, assert_near, made
from tests.models import tiny


@pytest.mark.parametrize(
    ("nickname", "repository"),
    [
        ("gpt2-small", "gpt2"),
        ("gpt2-xl", "gpt2-xl"),
        ("distil-gpt2", "distilgpt2"),
        ("opt-small", "facebook/opt-125m"),
        ("gpt-j", "EleutherAI/gpt-j-6B"),
        ("neo-medium", "EleutherAI/gpt-neo-1.3B"),
        ("pythia-70m", "EleutherAI/pythia-70m"),
        ("pythia-125m", "EleutherAI/pythia-160m"),
        ("EleutherAI/pythia-1.3b-deduped-v0", "EleutherAI/pythia-1.4b-deduped-v0"),
        ("pythia-125m-seed2", "EleutherAI/pythia-160m-seed2"),
        ("stanford-gpt2-small-a", "stanford-crfm/alias-gpt2-small-x21"),
        ("stanford-gpt2-medium-e", "stanford-crfm/eowyn-gpt2-medium-x777"),
        ("gpt2-mistral-small-c", "stanford-crfm/caprica-gpt2-small-x81"),
        ("tiny-stories-33M", "roneneldan/TinyStories-33M"),
        ("tiny-stories-instruct-1M", "roneneldan/TinyStories-Instruct-1M"),
        ("tiny-stories-1L-21M", "roneneldan/TinyStories-1Layer-21M"),
        ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("qwen3-0.6b-base", "Qwen/Qwen3-0.6B-Base"),
        ("qwen-1.8b-chat", "Qwen/Qwen-1_8B-Chat"),
        ("Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("gemma-2-2b", "google/gemma-2-2b"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ("phi-3", "microsoft/Phi-3-mini-4k-instruct"),
        ("bert-base-cased", "google-bert/bert-base-cased"),
        ("t5-small", "google-t5/t5-small"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("./gpt2-small", "./gpt2-small"),
    ],
)
def test_nicknames_mean_repositories(
    nickname: str, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_hub(nickname) == repository
    asked: list[str] = []

    def load(name: str, **options: Any) -> Any:
        asked.append(name)
        return types.SimpleNamespace(
            module=tiny.build("gpt2"), tokenizer=TOKENIZERS["eos"](), processor=None
        )

    monkeypatch.setattr(loading, "load", load)
    HookedTransformer.from_pretrained_no_processing(nickname)
    assert asked == [repository]


@pytest.mark.parametrize(
    ("nickname", "repository"),
    [
        ("gelu-2l", "NeelNanda/GELU_2L512W_C4_Code"),
        ("solu-8l-new", "NeelNanda/SoLU_8L1024W_C4_Code"),
        ("solu-8l-old", "NeelNanda/SoLU_8L_v21_old"),
        ("solu-1l-wiki", "NeelNanda/SoLU_1L512W_Wiki_Finetune"),
        ("attn-only-2l", "NeelNanda/Attn_Only_2L512W_C4_Code"),
        ("attn-only-2l-demo", "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr"),
        ("redwood_attn_2l", "ArthurConmy/redwood_attn_2l"),
        ("othello-gpt", "Baidicoot/Othello-GPT-Transformer-Lens"),
    ],
)
def test_weights_in_files_of_their_own_say_what_to_do(nickname: str, repository: str) -> None:
    assert own_file(nickname) == repository
    with pytest.raises(Unsupported, match=f"Download it from the repository '{repository}'"):
        HookedTransformer.from_pretrained(nickname)


def test_checkpoints_of_training_are_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    pythia, stanford = "EleutherAI/pythia-70m", "stanford-crfm/alias-gpt2-small-x21"
    assert revision(pythia, 15, None) == "step5000"
    assert revision(pythia, -1, None) == "step143000"
    assert revision(stanford, 100, None) == "checkpoint-7200"
    assert revision(stanford, None, 400_000) == "checkpoint-400000"
    assert revision("gpt2", None, None) is None
    with pytest.raises(ValueError, match=r"has no checkpoint 5001; the nearest is 5000\."):
        revision(pythia, None, 5001)
    with pytest.raises(ValueError, match=r"no checkpoints of training are known of 'gpt2'"):
        revision("gpt2", 3, None)
    given: dict[str, Any] = {}

    def load(name: str, **options: Any) -> Any:
        given.update(options)
        return types.SimpleNamespace(module=tiny.build("gpt2"), tokenizer=None, processor=None)

    monkeypatch.setattr(loading, "load", load)
    HookedTransformer.from_pretrained("pythia-70m", checkpoint_value=512, move_to_device=False)
    assert given["revision"] == "step512"
    assert given["device"] == "cpu"


def test_names_and_checkpoints_can_be_asked_for() -> None:
    asked = ("gpt2-small", "pythia", "gelu-2l", "somebody/else")
    assert [tl.loading.get_official_model_name(name) for name in asked] == [
        "gpt2",
        "EleutherAI/pythia-70m",
        "NeelNanda/GELU_2L512W_C4_Code",
        "somebody/else",
    ]
    steps, what = tl.loading.get_checkpoint_labels("pythia-70m")
    assert (len(steps), steps[3], steps[-1], what) == (154, 4, 143_000, "step")
    assert tl.loading.get_checkpoint_labels("pythia-70m-v0")[0][0] == 1000
    assert len(tl.loading.get_checkpoint_labels("stanford-gpt2-small-a")[0]) == 609
    with pytest.raises(ValueError, match="no checkpoints of training are known of 'gpt2'"):
        tl.loading.get_checkpoint_labels("gpt2")


FIRST = {
    ("gpt2", "eos"): [-3.2145, -4.5825, -3.2798],
    ("gpt2", "pad"): [0.1068, -4.0351, -4.0174],
    ("qwen2", "eos"): [-0.3504, 0.5483, 0.1687],
    ("qwen2", "pad"): [-0.2696, 0.2388, 0.8323],
}


@pytest.mark.parametrize(("kind", "which"), list(FIRST))
def test_later_layers_may_be_left_out(kind: str, which: str) -> None:
    whole = tiny.build(kind)
    before = copy.deepcopy(whole.state_dict())
    load = HookedTransformer.from_pretrained_no_processing
    model = load(kind, hf_model=whole, tokenizer=TOKENIZERS[which](), first_n_layers=1)
    assert len(model.blocks) == model.cfg.n_layers == 1
    assert_near(model("the cat")[0, -1, :3], FIRST[kind, which])
    assert model.generate("the cat", max_new_tokens=2, return_type="tokens").shape[1] >= 4
    assert whole.config.num_hidden_layers == 2
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    with pytest.raises(ValueError, match="first_n_layers is from 1 to 2; got 3"):
        load(kind, hf_model=whole, first_n_layers=3)


def test_texts_may_be_cut_shorter() -> None:
    model = made("eos", n_ctx=8)
    assert model.cfg.n_ctx == 8
    with pytest.warns(UserWarning, match="is cut to the 8"):
        tokens = model.to_tokens("the cat sat on the mat and the cat saw")
    assert tokens.shape == (1, 8)
    assert_near(model("the cat")[0, -1, :3], [0.0352, -3.9691, -3.1758])
    model.process_weights_()
    assert model.cfg.n_ctx == 8
    with pytest.raises(ValueError, match="n_ctx=100000, and the model has positions for"):
        made("eos", n_ctx=100_000)


PATHS = {
    "ActivationCache": ["ActivationCache"],
    "FactoredMatrix": ["FactoredMatrix"],
    "HookedEncoder": ["HookedEncoder"],
    "HookedEncoderDecoder": ["HookedEncoderDecoder"],
    "HookedRootModule": ["HookedRootModule"],
    "HookedTransformer": ["HookedTransformer"],
    "HookedTransformerConfig": ["HookedTransformerConfig"],
    "SVDInterpreter": ["SVDInterpreter"],
    "cache": ["TransformerLensKeyValueCache", "TransformerLensKeyValueCacheEntry"],
    "cache.key_value_cache": ["TransformerLensKeyValueCache"],
    "cache.key_value_cache_entry": ["TransformerLensKeyValueCacheEntry"],
    "config": ["HookedTransformerConfig"],
    "loading": ["get_official_model_name"],
    "loading_from_pretrained": ["get_official_model_name", "get_checkpoint_labels"],
    "hook_points": ["HookPoint", "HookedRootModule"],
    "model_bridge": ["TransformerBridge"],
    "past_key_value_caching": [
        "HookedTransformerKeyValueCache",
        "HookedTransformerKeyValueCacheEntry",
    ],
    "patching": ["generic_activation_patch"],
    "utils": ["get_act_name", "Slice", "to_numpy"],
}


@pytest.mark.parametrize("path", list(PATHS))
def test_code_imports_from_where_it_did(path: str) -> None:
    module = importlib.import_module(f"interpose.dialects.transformer_lens.{path}")
    for name in PATHS[path]:
        found = getattr(module, name)
        if hasattr(tl, name):
            assert found is getattr(tl, name)
            assert not isinstance(getattr(tl, name), types.ModuleType)


def test_state_dicts_of_models_from_scratch_have_the_masks_that_loaders_delete() -> None:
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=8, d_head=4, n_ctx=5, d_vocab=7, attn_only=True, seed=0
    )
    model = HookedTransformer(cfg)
    state = model.state_dict()
    assert torch.equal(state["blocks.1.attn.mask"], torch.ones(5, 5).tril().bool())
    assert state["blocks.0.attn.IGNORE"] == -torch.inf
    other = HookedTransformer(HookedTransformerConfig(**{**cfg.to_dict(), "seed": 1}))
    other.load_state_dict(state)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(other(tokens), model(tokens))
    for layer in range(2):
        del state[f"blocks.{layer}.attn.mask"], state[f"blocks.{layer}.attn.IGNORE"]
    assert set(state) == set(model.module.state_dict())


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "opt"])
def test_state_dicts_of_loaded_models_have_the_names_and_shapes_there(kind: str) -> None:
    model, other = (HookedTransformer(tiny.build(kind)) for _ in range(2))
    tokens = torch.tensor([[3, 4, 5, 6]])
    before, state = model(tokens), model.state_dict()
    cfg = model.cfg
    assert state["blocks.1.attn.W_Q"].shape == (cfg.n_heads, cfg.d_model, cfg.d_head)
    assert torch.equal(state["embed.W_E"], model.W_E)
    assert state["blocks.1.attn.mask"].shape == (cfg.n_ctx, cfg.n_ctx)
    assert bool(state["blocks.0.attn.IGNORE"].isneginf())
    changed = {name: value.clone() for name, value in state.items()}
    for layer in range(2):
        changed[f"blocks.{layer}.attn.W_V"] *= 2
    assert str(model.load_state_dict(changed)) == "<All keys matched successfully>"
    assert not torch.equal(model(tokens), before)
    doubled = model.run_with_cache(tokens)[1]["v", 0] - model.b_V[0]
    plain = other.run_with_cache(tokens)[1]["v", 0] - other.b_V[0]
    torch.testing.assert_close(doubled, 2 * plain, atol=1e-5, rtol=1e-5)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(tokens), before)
    model.load_state_dict(other.module.state_dict())  # its own names are taken too
    with pytest.raises(ValueError, match=r"not in both: \['blocks.0.attn.W_V'\]"):
        other.load_state_dict({k: v for k, v in state.items() if k != "blocks.0.attn.W_V"})
    with pytest.raises(ValueError, match=r"'embed.W_E' is \[3\] in the state dict"):
        other.load_state_dict(state | {"embed.W_E": torch.zeros(3)})
    assert list(tl.TransformerBridge(other.module).state_dict()) == list(other.module.state_dict())


def test_a_state_dict_that_has_no_place_in_the_module_is_refused() -> None:
    model = HookedTransformer(tiny.build("gpt2"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["unembed.b_U"] += 1  # GPT-2's head has no bias
    with pytest.raises(Unsupported, match=r"'unembed\.b_U' cannot be loaded"):
        model.load_state_dict(state)
    experts = HookedTransformer(tiny.build("mixtral"))
    with pytest.raises(Unsupported, match=r"model\.module\.state_dict\(\) has"):
        experts.state_dict()
