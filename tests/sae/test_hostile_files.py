"""Files of autoencoders that someone else wrote: they are read and work, or `ip.FileError` says what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import interpose as ip
from tests.files.changes import changed, changed_bytes, changed_tensors
from tests.sae.test_files import B_DEC, B_ENC, SAELENS, THRESHOLD, W_DEC, W_ENC, drawn, gemma_params

TORCH_STYLE = {
    "encoder.weight": W_ENC.T.contiguous(),
    "encoder.bias": B_ENC,
    "decoder.weight": W_DEC.T.contiguous(),
}


def trainer(name: str, **more: Any) -> dict[str, Any]:
    told = {"dict_class": name, "layer": 3, "lm_name": "google/gemma-2-2b", **more}
    return {"config.json": {"trainer": told, "buffer": {"ctx_len": 128}}}


LLAMA = {
    "d_model": 6, "d_sae": 14, "jump_relu_threshold": 0.4, "hook_point_in": "blocks.5.hook_resid_post",
    "dataset_average_activation_norm": {"in": 2.0, "out": 2.0}, "hook_point_out": "blocks.5.hook_mlp_out",
}  # fmt: skip
BIASED = TORCH_STYLE | {"decoder.bias": B_DEC}
MADE: dict[str, dict[str, Any]] = {
    "gemma-scope-2b-pt-res/layer_12/a": {"params.npz": gemma_params()},
    "gemma-scope-2b-pt-transcoders/layer_4/a": {"params.npz": gemma_params()},
    "gemma-2/layer_9_x": {
        "params.safetensors": gemma_params(),
        "config.json": {"model_name": "gemma", "hf_hook_point_in": "model.layers.9.output"},
    },
    "sparsify/layers.2.mlp": {
        "cfg.json": {"d_in": 6, "k": 3, "num_latents": 14, "transcode": True},
        "sae.safetensors": {"encoder.weight": TORCH_STYLE["encoder.weight"], "encoder.bias": B_ENC,
                            "W_dec": W_DEC, "b_dec": B_DEC, "W_skip": drawn(6, 6, seed=9)},
    },
    "learned/topk": {
        **trainer("AutoEncoderTopK", k=4),
        "ae.pt": {**TORCH_STYLE, "b_dec": B_DEC, "k": torch.tensor(4)},
    },
    "learned/jump": {
        **trainer("BatchTopKSAE"),
        "ae.pt": {**TORCH_STYLE, "b_dec": B_DEC, "threshold": torch.tensor(0.5)},
    },
    "learned/gated": {
        **trainer("GatedAutoEncoder"),
        "ae.pt": {**TORCH_STYLE, "decoder_bias": B_DEC, "r_mag": B_ENC, "gate_bias": B_ENC, "mag_bias": B_ENC},
    },
    "learned/cross": {
        "config.json": {"trainer": {"dict_class": "CrossCoder"}, "site": ["a", "b"]},
        "ae.pt": {"encoder.weight": drawn(2, 6, 14), "encoder.bias": B_ENC,
                  "decoder.weight": drawn(2, 14, 6), "decoder.bias": drawn(2, 6)},
    },
    "llama/old": {"hyperparams.json": LLAMA, "checkpoints/final.safetensors": BIASED},
    "llama/new": {
        "config.json": LLAMA,
        "sae_weights.safetensors": BIASED | {"log_jumprelu_threshold": THRESHOLD.log()},
    },
    "SAE-Res-Qwen3-1.7B-Base-W32K-L0_3": {
        "layer7.sae.pt": {"W_enc": W_ENC.T.contiguous(), "W_dec": W_DEC.T.contiguous(),
                          "b_enc": B_ENC, "b_dec": B_DEC},
    },
}  # fmt: skip
"""Layouts of others, as `sae/test_files.py` has them."""
LAYOUTS = [*MADE, *(f"saelens/{folder.name}" for folder in sorted(SAELENS.iterdir()))]


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(data))
    elif path.suffix == ".npz":
        np.savez(path, **{name: one.numpy() for name, one in data.items()})
    elif path.suffix == ".pt":
        torch.save(data, path)
    else:
        save_file(data, path)


def contents(layout: str) -> dict[str, Any]:
    """The files of a layout, by name: what JSON says, and tensors."""
    if layout in MADE:
        return MADE[layout]
    folder = SAELENS / layout.removeprefix("saelens/")
    return {
        "cfg.json": json.loads((folder / "cfg.json").read_text()),
        "sae_weights.safetensors": load_file(folder / "sae_weights.safetensors"),
    }


def used(sae: ip.SAE) -> None:
    """Do with an autoencoder what people do."""
    assert len(repr(sae)) < 2000
    x = torch.linspace(-1, 1, 3 * sae.d_in).reshape(3, sae.d_in)
    with torch.no_grad():
        codes = sae.codes(x.to(sae.W_dec.dtype))
        assert sae.encode(x.to(sae.W_dec.dtype)).shape == (3, sae.d_sae)
        assert sae(x.to(sae.W_dec.dtype)).shape == (3, sae.d_out)
    assert codes.dense().shape == (3, sae.d_sae)


def read_or_refused(folder: Path) -> bool:
    """Whether it is refused, in a sentence that names the file; if it is not, it must work."""
    try:
        sae = ip.SAE.from_pretrained(folder)
    except (ip.FileError, ip.Unsupported, FileNotFoundError) as error:
        said = str(error)
        assert str(folder) in said, said
        assert len(said) < 1500, said
        assert said.isprintable(), said
        return True
    used(sae)
    return False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_autoencoders_are_read_or_refused(layout: str, tmp_path: Path) -> None:
    whole, folder = contents(layout), tmp_path / layout
    for name, data in whole.items():
        write(folder / name, data)
    assert not read_or_refused(folder)
    draw, refused = random.Random(layout), 0
    for _ in range(ROUNDS):
        name = draw.choice(sorted(whole))
        if draw.random() < 0.3:
            changed_bytes(folder / name, draw)
        else:
            change = changed if name.endswith(".json") else changed_tensors
            write(folder / name, change(whole[name], draw))
        refused += read_or_refused(folder)
        write(folder / name, whole[name])
    assert refused > ROUNDS / 5
    assert not read_or_refused(folder)


ROUNDS = 30


# What a random change does not find.


def stretched(*shape: int) -> Tensor:
    """One number that says it is many."""
    return torch.ones(1).expand(*shape)


TORCH = {
    "W_enc": W_ENC.T.contiguous(),
    "W_dec": W_DEC.T.contiguous(),
    "b_enc": B_ENC,
    "b_dec": B_DEC,
}
OF_TORCH: list[tuple[Any, str]] = [
    ({**TORCH, "W_enc": stretched(10**6, 10**7)}, "the file has fewer numbers"),
    ({**TORCH, "more": stretched(10**9, 10**9)}, "the file has fewer numbers"),
    ({**TORCH, "W_enc": W_ENC.T.to_sparse()}, "of layout torch.sparse_coo"),
    ({**TORCH, "W_enc": torch.empty(14, 6, device="meta")}, "on meta"),
    ({**TORCH, "W_enc": W_ENC.T.to(torch.complex64)}, "torch.complex64"),
    ({**TORCH, "W_enc": W_ENC.T.int()}, "should be of floating point"),
    ({**TORCH, "b_dec": B_DEC * float("nan")}, "not finite"),
    ([W_ENC], "holds a list"),
    ("W_enc", "holds a str"),
]


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(("saved", "said"), OF_TORCH, ids=lambda one: str(one)[:9])
def test_tensors_of_torch_that_are_no_weights_are_refused(
    saved: Any, said: str, tmp_path: Path
) -> None:
    torch.save(saved, tmp_path / "layer1.sae.pt")
    with pytest.raises(ip.FileError, match=said):
        ip.SAE.from_pretrained(tmp_path, k=3)


def npz(path: Path, header: str, content: bytes = b"", name: str = "w_enc.npy") -> None:
    """An archive with one array whose header is what someone wrote."""
    head = header.encode().ljust(118, b" ")[:117] + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + content)


@pytest.mark.parametrize(
    ("header", "content", "said"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}", b"", "not a file of NumPy"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2)}", b"", "not a file of NumPy"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nmkdir\n", "Object arrays"),
        ("{'descr': '<U9', 'fortran_order': False, 'shape': (1,)}", b"x" * 36, "not a file of NumPy"),
        ("__import__('os').mkdir('owned')", b"", "not a file of NumPy"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (4000000,)}", bytes(16_000_000), "16000128 bytes of"),
    ],
    ids=["huge", "negative", "pickle", "text", "program", "swelling"],
)  # fmt: skip
def test_archives_of_numpy_that_are_no_weights_are_refused(
    header: str, content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    npz(tmp_path / "params.npz", header, content)
    with pytest.raises(ip.FileError, match=said):
        ip.SAE.from_pretrained(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["params.npz"]


def test_a_header_that_says_more_than_there_is_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SAELENS / "topk", tmp_path / "sae")
    huge = {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}
    head = json.dumps({"W_enc": huge}).encode()
    for content in (len(head).to_bytes(8, "little") + head, (2**60).to_bytes(8, "little") + head):
        (tmp_path / "sae" / "sae_weights.safetensors").write_bytes(content)
        with pytest.raises(ip.FileError, match="is not a safetensors file"):
            ip.SAE.from_pretrained(tmp_path / "sae")


def test_what_is_no_file_is_said_and_links_of_a_download_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "sae"
    folder.mkdir()
    for name in ("cfg.json", "sae_weights.safetensors"):  # as a hub's cache has them
        (folder / name).symlink_to(SAELENS / "topk" / name)
    assert type(ip.SAE.from_pretrained(folder)) is ip.TopKSAE
    (folder / "cfg.json").unlink()
    os.mkfifo(folder / "cfg.json")
    for path in (folder, folder / "cfg.json"):
        with pytest.raises(ip.FileError, match="is a pipe, and a file is read here"):
            ip.SAE.from_pretrained(path)
