"""Files of autoencoders: what SAELens saved encodes as it does there, and each layout is read as it is meant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import interpose as ip
from tests.bounds import assert_near
from tests.sae.oracles import KINDS, made

SAELENS = Path(__file__).parent / "saelens"  # made by SAELens 6.54.12: see saelens_files.py


@pytest.mark.parametrize("folder", sorted(SAELENS.iterdir()), ids=lambda folder: folder.name)
def test_what_saelens_saved_encodes_as_it_does_there(folder: Path) -> None:
    sae = ip.SAE.from_pretrained(folder)
    wanted = load_file(folder / "expected.safetensors")
    assert 0 < (wanted["codes"] != 0).float().mean() < 1
    x = wanted["x"]
    codes = sae.encode(x)
    assert ((codes != 0) == (wanted["codes"] != 0)).all()
    assert_near(codes, wanted["codes"], x)
    assert_near(sae(x), wanted["out"], x, codes)


@pytest.mark.parametrize(
    "name", ["batchtopk_in_training", "matryoshka_batchtopk_in_training", "topk_by_norm"]
)
def test_what_saelens_goes_on_training_keeps_its_own_kind(name: str) -> None:
    sae = ip.SAE.from_pretrained(SAELENS / name)
    kind = {"b": ip.BatchTopKSAE, "m": ip.MatryoshkaSAE, "t": ip.TopKSAE}[name[0]]
    assert type(sae) is kind
    assert sae.by_norm
    assert sae.k == 3


def test_what_saelens_says_of_the_model_is_kept_under_todays_names() -> None:
    assert ip.SAE.from_pretrained(SAELENS / "topk").about["hook_name"] == "blocks.1.hook_resid_post"
    old = ip.SAE.from_pretrained(SAELENS / "before_6")
    assert type(old) is ip.TopKSAE
    assert old.k == 4
    assert old.about["model_name"] == "gpt2-small"
    assert old.about["hook_name"] == "blocks.3.hook_resid_pre"


@pytest.mark.parametrize("options", [{}, {"by_norm": True}], ids=["plain", "by_norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loads_again_with_the_same_codes(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if kind == "MatchingPursuitSAE":
        options = {}
    about = {"hook_name": "blocks.1.hook_resid_post", "model_name": "gpt2"}
    sae, x = made(kind, about=about, **options), torch.randn(7, 6)
    before = {name: one.clone() for name, one in sae.state_dict().items()}
    sae.save(tmp_path / "sae")
    assert all(torch.equal(one, before[name]) for name, one in sae.state_dict().items())
    again = ip.SAE.from_pretrained(tmp_path / "sae")
    assert again.about["hook_name"] == about["hook_name"]
    assert again.about["model_name"] == "gpt2"
    assert_near(again.encode(x), sae.encode(x), x)
    assert_near(again(x), sae(x), x)
    if not options and not isinstance(sae, ip.BatchTopKSAE):
        assert type(again) is type(sae)
        assert torch.equal(again.encode(x), sae.encode(x))
    cfg = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    assert cfg["metadata"]["sae_lens_version"].split(".")[0] == "6"


def test_dtypes_transcoders_and_single_files_are_kept_and_found(tmp_path: Path) -> None:
    sae = made("JumpReLUSAE", d_out=4, skip=True).to(torch.bfloat16)
    sae.save(tmp_path)
    again = ip.SAE.from_pretrained(tmp_path / "sae_weights.safetensors")
    assert again.W_enc.dtype == torch.bfloat16
    assert again.is_transcoder
    assert again.W_skip is not None
    assert torch.equal(again.W_skip, sae.W_skip)
    assert ip.SAE.from_pretrained(tmp_path, dtype=torch.float32).W_enc.dtype == torch.float32
    with pytest.raises(ip.Unsupported, match="no place for transcoders of kind 'topk'"):
        made("TopKSAE", d_out=4).save(tmp_path / "other")
    with pytest.raises(ip.Unsupported, match="no place"):
        ip.CrossCoder(3, 4, site=["a", "b"]).save(tmp_path / "other")


# Layouts of others: small files as their publishers write them, and codes by hand.


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size)))


W_ENC, W_DEC, B_ENC, B_DEC = drawn(6, 14), drawn(14, 6, seed=1), drawn(14, seed=2), drawn(6, seed=3)
THRESHOLD = drawn(14, seed=4).abs()
X = drawn(8, 6, seed=5)


def jump(x: Tensor, threshold: Any = THRESHOLD, enc: Tensor = W_ENC) -> Tensor:
    pre = x @ enc + B_ENC
    return pre.clamp(min=0) * (pre > threshold)


def top(pre: Tensor, k: int) -> Tensor:
    return torch.where(pre >= pre.sort(-1, descending=True).values[:, k - 1 : k], pre, 0.0).clamp(
        min=0
    )


def check(sae: ip.SAE, codes: Tensor, out: Tensor, x: Tensor = X) -> None:
    assert 0 < (codes != 0).float().mean() < 1
    assert_near(sae.encode(x), codes, x, 10.0)
    assert_near(sae(x), out, codes, x, 10.0)


def gemma_params() -> dict[str, Tensor]:
    return {"w_enc": W_ENC, "w_dec": W_DEC, "b_enc": B_ENC, "b_dec": B_DEC, "threshold": THRESHOLD}


GEMMA_1 = [
    ("gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82", "blocks.12.hook_resid_post"),
    ("gemma-scope-9b-pt-mlp/layer_3/width_16k/average_l0_5", "blocks.3.hook_mlp_out"),
    ("gemma-scope-2b-pt-att/layer_0/width_16k/average_l0_5", "blocks.0.attn.hook_z"),
]


@pytest.mark.parametrize(("folder", "hook"), GEMMA_1)
def test_gemma_scope_1(folder: str, hook: str, tmp_path: Path) -> None:
    there = tmp_path / folder
    there.mkdir(parents=True)
    np.savez(there / "params.npz", **{name: one.numpy() for name, one in gemma_params().items()})
    for path in (there, there / "params.npz"):
        sae = ip.SAE.from_pretrained(path)
        check(sae, jump(X), jump(X) @ W_DEC + B_DEC)
        assert sae.about["hook_name"] == hook
        assert sae.about["model_name"] == ("gemma-2-9b" if "9b" in folder else "gemma-2-2b")


def test_gemma_scope_of_embeddings_takes_them_as_the_model_has_them(tmp_path: Path) -> None:
    there = tmp_path / "gemma-scope-2b-pt-res" / "embedding" / "width_4k"
    there.mkdir(parents=True)
    np.savez(there / "params.npz", **{name: one.numpy() for name, one in gemma_params().items()})
    sae = ip.SAE.from_pretrained(there)
    codes = jump(X / 6**0.5)
    check(sae, codes, codes @ W_DEC * 6**0.5 + B_DEC)
    assert sae.about["hook_name"] == "hook_embed"


def test_gemma_scope_transcoders_read_the_norm_and_write_the_mlp(tmp_path: Path) -> None:
    there = tmp_path / "gemma-scope-2b-pt-transcoders" / "layer_4" / "width_16k" / "average_l0_6"
    there.mkdir(parents=True)
    np.savez(there / "params.npz", **{name: one.numpy() for name, one in gemma_params().items()})
    sae = ip.SAE.from_pretrained(there)
    check(sae, jump(X), jump(X) @ W_DEC + B_DEC)
    assert sae.is_transcoder
    assert sae.about["hook_name"] == "blocks.4.ln2.hook_normalized"
    assert sae.about["hook_name_out"] == "blocks.4.hook_mlp_out"


def test_gemma_scope_2(tmp_path: Path) -> None:
    plain, skips = (
        tmp_path / "resid_post" / "layer_9_width_16k_l0_small",
        tmp_path / "transcoder" / "layer_9_x",
    )
    cfg = {
        "architecture": "jump_relu",
        "model_name": "gemma-v3-270m-pt",
        "hf_hook_point_in": "model.layers.9.output",
    }
    for there in (plain, skips):
        there.mkdir(parents=True)
    (plain / "config.json").write_text(json.dumps(cfg))
    save_file(gemma_params(), plain / "params.safetensors")
    sae = ip.SAE.from_pretrained(plain)
    check(sae, jump(X), jump(X) @ W_DEC + B_DEC)
    assert sae.about["hf_hook_name"] == "model.layers.9.output"
    assert sae.about["hook_name"] == "blocks.9.hook_resid_post"
    around = drawn(6, 6, seed=8)  # written as [d_in, d_out]
    (skips / "config.json").write_text(json.dumps({**cfg, "affine_connection": True}))
    save_file({**gemma_params(), "affine_skip_connection": around}, skips / "params.safetensors")
    sae = ip.SAE.from_pretrained(skips)
    check(sae, jump(X), jump(X) @ W_DEC + B_DEC + X @ around)
    assert sae.about["hook_name_out"] == "blocks.9.hook_mlp_out"


@pytest.mark.parametrize(
    "size", [{"num_latents": 14}, {"num_latents": 0, "expansion_factor": 2}, {}], ids=str
)
def test_sparsify(size: dict[str, int], tmp_path: Path) -> None:
    there = tmp_path / "layers.10"
    there.mkdir()
    (there / "cfg.json").write_text(json.dumps({"d_in": 6, "k": 3, **size}))
    (tmp_path / "config.json").write_text(json.dumps({"model": "EleutherAI/pythia-70m"}))
    weights = {"encoder.weight": W_ENC.T, "encoder.bias": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}
    save_file({name: one.contiguous() for name, one in weights.items()}, there / "sae.safetensors")
    sae = ip.SAE.from_pretrained(there)
    codes = top((X - B_DEC) @ W_ENC + B_ENC, 3)
    check(sae, codes, codes @ W_DEC + B_DEC)
    assert sae.about["model_name"] == "EleutherAI/pythia-70m"
    assert sae.about["hook_name"] == "blocks.10.hook_resid_post"


def test_sparsify_transcoders_have_a_path_around(tmp_path: Path) -> None:
    there = tmp_path / "layers.2.mlp"
    there.mkdir()
    (there / "cfg.json").write_text(
        json.dumps({"d_in": 6, "k": 3, "transcode": True, "skip_connection": True})
    )
    skip = drawn(6, 6, seed=9)
    weights = {
        "encoder.weight": W_ENC.T,
        "encoder.bias": B_ENC,
        "W_dec": W_DEC,
        "b_dec": B_DEC,
        "W_skip": skip,
    }
    save_file({name: one.contiguous() for name, one in weights.items()}, there / "sae.safetensors")
    sae = ip.SAE.from_pretrained(there)
    codes = top(X @ W_ENC + B_ENC, 3)
    check(sae, codes, codes @ W_DEC + B_DEC + X @ skip.T)
    assert sae.about["hook_name_out"] == "blocks.2.hook_mlp_out"


def dictionary(folder: Path, name: str, weights: dict[str, Tensor], **trainer: Any) -> ip.SAE:
    told = {
        "dict_class": name,
        "activation_dim": 6,
        "dict_size": 14,
        "layer": 3,
        "lm_name": "google/gemma-2-2b",
    }
    cfg = {"trainer": {**told, **trainer}, "buffer": {"ctx_len": 128}}
    (folder / "config.json").write_text(json.dumps(cfg))
    torch.save(weights, folder / "ae.pt")
    return ip.SAE.from_pretrained(folder)


def test_dictionary_learning(tmp_path: Path) -> None:
    torch_style = {"encoder.weight": W_ENC.T, "encoder.bias": B_ENC, "decoder.weight": W_DEC.T}
    centred = (X - B_DEC) @ W_ENC
    plain = dictionary(tmp_path, "AutoEncoder", {**torch_style, "bias": B_DEC})
    codes = (centred + B_ENC).clamp(min=0)
    check(plain, codes, codes @ W_DEC + B_DEC)
    assert plain.about["hook_name"] == "blocks.3.hook_resid_post"
    assert plain.about["context_size"] == 128
    tops = dictionary(
        tmp_path, "AutoEncoderTopK", {**torch_style, "b_dec": B_DEC, "k": torch.tensor(4),
        "threshold": torch.tensor(9.0)}, k=4,
    )  # fmt: skip
    codes = top(centred + B_ENC, 4)
    check(tops, codes, codes @ W_DEC + B_DEC)
    batch = dictionary(
        tmp_path,
        "BatchTopKSAE",
        {**torch_style, "b_dec": B_DEC, "threshold": torch.tensor(0.5)},
        k=4,
    )
    codes = jump(X - B_DEC, 0.5)
    check(batch, codes, codes @ W_DEC + B_DEC)
    jumps = dictionary(
        tmp_path, "JumpReluAutoEncoder",
        {"W_enc": W_ENC, "W_dec": W_DEC, "b_enc": B_ENC, "b_dec": B_DEC, "threshold": THRESHOLD},
    )  # fmt: skip
    check(jumps, jump(X), jump(X) @ W_DEC + B_DEC)
    r_mag, b_mag = drawn(14, seed=6), drawn(14, seed=7)
    gated = dictionary(
        tmp_path, "GatedAutoEncoder",
        {"encoder.weight": W_ENC.T, "decoder.weight": W_DEC.T, "decoder_bias": B_DEC, "r_mag": r_mag,
         "gate_bias": B_ENC, "mag_bias": b_mag},
    )  # fmt: skip
    codes = torch.where(centred + B_ENC > 0, (centred * r_mag.exp() + b_mag).clamp(min=0), 0.0)
    check(gated, codes, codes @ W_DEC + B_DEC)
    with pytest.raises(ip.Unsupported, match="has the class 'IdentityDict'"):
        dictionary(tmp_path, "IdentityDict", {})


def test_crosscoders_of_dictionary_learning(tmp_path: Path) -> None:
    weights = {
        "encoder.weight": drawn(2, 6, 14),
        "encoder.bias": B_ENC,
        "decoder.weight": drawn(2, 14, 6),
        "decoder.bias": drawn(2, 6),
    }
    sae = dictionary(tmp_path, "CrossCoder", weights)
    assert isinstance(sae, ip.CrossCoder)
    x = drawn(5, 2, 6, seed=3)
    codes = (torch.einsum("nsd,sdl->nl", x, weights["encoder.weight"]) + B_ENC).clamp(min=0)
    out = torch.einsum("nl,sld->nsd", codes, weights["decoder.weight"]) + weights["decoder.bias"]
    check(sae, codes, out.flatten(1), x.flatten(1))


@pytest.mark.parametrize("norm", [6**0.5, 1.7])
def test_llama_scope(norm: float, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    cfg = {
        "d_model": 6, "d_sae": 14, "jump_relu_threshold": 0.4,
        "dataset_average_activation_norm": {"in": norm, "out": norm},
        "hook_point_in": "blocks.5.hook_resid_post", "hook_point_out": "blocks.5.hook_resid_post",
    }  # fmt: skip
    (tmp_path / "hyperparams.json").write_text(json.dumps(cfg))
    weights = {
        "encoder.weight": W_ENC.T,
        "decoder.weight": W_DEC.T,
        "encoder.bias": B_ENC,
        "decoder.bias": B_DEC,
    }
    save_file(
        {name: one.contiguous() for name, one in weights.items()},
        tmp_path / "checkpoints" / "final.safetensors",
    )
    sae = ip.SAE.from_pretrained(tmp_path)
    scale = 6**0.5 / norm  # so that an average vector has a norm of the root of its width
    codes = jump(X * scale, 0.4 * scale)
    check(sae, codes, (codes @ W_DEC + B_DEC) / scale)
    assert sae.about["hook_name"] == "blocks.5.hook_resid_post"
    assert not sae.is_transcoder


def test_llama_scope_of_distilled_models(tmp_path: Path) -> None:
    cfg = {"d_model": 6, "expansion_factor": 2, "hook_point_in": "blocks.5.hook_resid_post"}
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    weights = {
        "encoder.weight": W_ENC.T, "decoder.weight": W_DEC.T, "encoder.bias": B_ENC, "decoder.bias": B_DEC,
        "log_jumprelu_threshold": THRESHOLD.log(),
    }  # fmt: skip
    save_file(
        {name: one.contiguous() for name, one in weights.items()},
        tmp_path / "sae_weights.safetensors",
    )
    check(ip.SAE.from_pretrained(tmp_path), jump(X), jump(X) @ W_DEC + B_DEC)


def test_qwen_scope(tmp_path: Path) -> None:
    there = tmp_path / "SAE-Res-Qwen3-1.7B-Base-W32K-L0_3"
    there.mkdir()
    weights = {
        "W_enc": W_ENC.T.contiguous(),
        "W_dec": W_DEC.T.contiguous(),
        "b_enc": B_ENC,
        "b_dec": B_DEC,
    }
    torch.save(weights, there / "layer7.sae.pt")
    codes = top(X @ W_ENC + B_ENC, 3)
    for path in (there, there / "layer7.sae.pt"):
        sae = ip.SAE.from_pretrained(path)
        check(sae, codes, codes @ W_DEC + B_DEC)
        assert sae.about["hook_name"] == "blocks.7.hook_resid_post"
        assert sae.about["model_name"] == "Qwen/Qwen3-1.7B-Base"
    torch.save(weights, there / "layer8.sae.pt")
    with pytest.raises(
        ip.FileError, match=r"has 2 autoencoders, such as 'layer7.sae.pt': give the file"
    ):
        ip.SAE.from_pretrained(there)
    torch.save(weights, tmp_path / "layer8.sae.pt")
    with pytest.raises(ip.FileError, match="does not say how many latents fire"):
        ip.SAE.from_pretrained(tmp_path / "layer8.sae.pt")
    assert ip.SAE.from_pretrained(tmp_path / "layer8.sae.pt", k=5).k == 5


# Files that are broken, or meant to do harm.


class Harm:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_program_in_a_file_is_run_unless_that_is_asked_for(tmp_path: Path) -> None:
    there = tmp_path / "SAE-Res-Qwen3-1.7B-Base-W32K-L0_3"
    there.mkdir()
    weights = {"W_enc": W_ENC.T, "W_dec": W_DEC.T, "b_enc": B_ENC, "b_dec": B_DEC}
    torch.save({**weights, "more": Harm(tmp_path / "harm")}, there / "layer7.sae.pt")
    with pytest.raises(
        ip.FileError,
        match=r"could run any program. If you trust whoever wrote it, say pickles=True",
    ):
        ip.SAE.from_pretrained(there)
    assert not (tmp_path / "harm").exists()
    assert ip.SAE.from_pretrained(there, pickles=True).k == 3
    assert (tmp_path / "harm").exists()
    np.savez(tmp_path / "params.npz", w_enc=np.array([Harm(tmp_path / "other")], dtype=object))
    with pytest.raises(ip.FileError, match="not a file of NumPy arrays"):
        ip.SAE.from_pretrained(tmp_path / "params.npz")
    assert not (tmp_path / "other").exists()


def change_cfg(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        cfg = json.loads((folder / "cfg.json").read_text())
        (folder / "cfg.json").write_text(json.dumps({**cfg, **changes}))

    return change


def change_weights(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "sae_weights.safetensors")
        for name, one in changes.items():
            weights.pop(name, None)
            if one is not None:
                weights[name] = one
        save_file(weights, folder / "sae_weights.safetensors")

    return change


BROKEN: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (change_cfg(d_in=7), ip.FileError, "says that d_in is 7, and the weights have 6"),
    (change_cfg(d_sae="14"), ip.FileError, "d_sae is '14', and should be a whole number"),
    (change_cfg(d_sae=None), ip.FileError, "has no field 'd_sae'"),
    (change_cfg(k=15), ip.FileError, "says that 15 of 14 latents fire"),
    (change_cfg(k=None), ip.FileError, "has no field 'k'"),
    (change_cfg(k=-1), ip.FileError, "k is -1"),
    (
        change_cfg(architecture="temporal"),
        ip.Unsupported,
        "has the architecture 'temporal'; those that can be read are",
    ),
    (
        change_cfg(normalize_activations="expected_average_only_in"),
        ip.Unsupported,
        "SAELens folds them into the weights",
    ),
    (change_cfg(normalize_activations="else"), ip.FileError, "normalize_activations is 'else'"),
    (change_cfg(metadata=[1]), ip.FileError, "metadata is a list of 1"),
    (change_cfg(apply_b_dec_to_input="yes"), ip.FileError, "should be true or false"),
    (change_weights(W_enc=None), ip.FileError, "W_enc is missing"),
    (change_weights(b_enc=None), ip.FileError, "has no 'b_enc'"),
    (change_weights(b_enc=torch.zeros(3)), ip.FileError, r"b_enc is \(3,\), and should be \(14,\)"),
    (
        change_weights(W_dec=torch.zeros(14)),
        ip.FileError,
        r"W_dec is \(14,\), and should be a matrix",
    ),
    (
        change_weights(b_dec=torch.full((6,), float("nan"))),
        ip.FileError,
        "numbers that are not finite",
    ),
    (
        change_weights(b_dec=torch.zeros(6, dtype=torch.int64)),
        ip.FileError,
        "should be of floating point",
    ),
    (
        change_weights(scaling_factor=torch.full((14,), 2.0)),
        ip.Unsupported,
        "finetuning_scaling_factor",
    ),
    (lambda folder: (folder / "cfg.json").write_text("{"), ip.FileError, "is not JSON"),
    (lambda folder: (folder / "cfg.json").write_text("[]"), ip.FileError, "should be an object"),
    (
        lambda folder: (folder / "sae_weights.safetensors").write_bytes(b"none"),
        ip.FileError,
        "not a safetensors file",
    ),
    (
        lambda folder: (folder / "cfg.json").unlink(),
        ip.FileError,
        "no files of an autoencoder in a layout that is known",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "words"), BROKEN, ids=[words[:30] for _, _, words in BROKEN]
)
def test_broken_files_are_refused_in_words(
    change: Callable[[Path], Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    made("TopKSAE", d_sae=14, k=3).save(tmp_path)
    ip.SAE.from_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=words):
        ip.SAE.from_pretrained(tmp_path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded here"):
        ip.SAE.from_pretrained(tmp_path / "none")
    (tmp_path / "some.bin").write_bytes(b"x")
    with pytest.raises(ip.FileError, match="no name that is known of autoencoders"):
        ip.SAE.from_pretrained(tmp_path / "some.bin")
    (tmp_path / "layer1.sae.pt").write_bytes(b"x")
    with pytest.raises(ip.FileError, match=r"is not a file of torch|holds more than tensors"):
        ip.SAE.from_pretrained(tmp_path / "layer1.sae.pt", k=3)


def test_a_loaded_file_attaches_where_it_says(tmp_path: Path) -> None:
    model = ip.load("pocket")
    about = {"hook_name": "blocks.3.hook_resid_post"}
    made("TopKSAE", 192, 32, about=about).save(tmp_path)
    with ip.SAE.from_pretrained(tmp_path).attach(model) as there:
        _, cache = model.run_with_cache("The cat", names_filter=["sae.latents"])
        assert cache["sae.latents"].shape == (1, 2, 32)
        assert there.site == about["hook_name"]
