"""Models in folders that someone else has made: their code runs only when it is asked for, and nobody is asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import interpose as ip
from interpose.models.loading import POCKET

CODE = """
from pathlib import Path
Path({marker!r}).write_text("{name} ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class Config(LlamaConfig):
    model_type = {kind!r}

class Net(LlamaForCausalLM):
    config_class = Config

class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No one sits at the terminal, and modules of models go to a folder of this test."""

    def asked(*_: Any) -> str:
        raise AssertionError("the terminal was asked")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))


def folder(path: Path, kind: str, **config: Any) -> tuple[Path, Path]:
    """A folder with a small llama, and code that leaves a mark when it runs."""
    path.mkdir()
    small = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(small).save_pretrained(path)
    marker = path / "marker"
    (path / "own.py").write_text(CODE.format(marker=str(marker), name="own", kind=kind))
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text(
        CODE.format(marker=str(marker), name="generate", kind=kind) + "def generate(*a, **k): ...\n"
    )
    data = json.loads((path / "config.json").read_text())
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Net"}
    data |= {"model_type": kind, "auto_map": names, **config}
    (path / "config.json").write_text(json.dumps(data))
    return path, marker


def test_code_in_a_folder_runs_only_when_it_is_asked_for(nobody: None, tmp_path: Path) -> None:
    path, marker = folder(tmp_path / "own", "ownkind", architectures=["Net"])
    for options in ({}, {"trust_remote_code": False}):
        with pytest.raises(ip.FileError, match=r"brings code of its own, which is not run unless"):
            ip.load(str(path), device="cpu", **options)
    with pytest.raises(TypeError, match="trust_remote_code is True or False; got 'false'"):
        ip.load(str(path), trust_remote_code="false")
    assert not marker.exists()
    model = ip.load(str(path), device="cpu", trust_remote_code=True)
    assert marker.exists()
    assert type(model.module).__name__ == "Net"
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 16)


def test_code_beside_a_model_that_transformers_knows_does_not_run(
    nobody: None, tmp_path: Path
) -> None:
    path, marker = folder(tmp_path / "own", "llama")
    tokens = {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": ["own.Tokens", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.warns(UserWarning, match="is code of its own, which was not run: the model takes"):
        model = ip.load(str(path), device="cpu")
    assert type(model.module) is transformers.LlamaForCausalLM
    assert model.tokenizer is None
    with torch.no_grad():
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    assert not marker.exists()


def test_what_a_config_says_of_classes_and_kernels_is_checked(nobody: None, tmp_path: Path) -> None:
    names = ["pipeline", 3, "Trainer", "__name__", "LlamaConfig"]
    path, _ = folder(tmp_path / "own", "llama", architectures=names, auto_map={})
    assert type(ip.load(str(path), device="cpu").module) is transformers.LlamaForCausalLM
    path, _ = folder(tmp_path / "kernel", "llama", attn_implementation="evil/kernel")
    with pytest.raises(ip.FileError, match="asks for the attention 'evil/kernel', which is code"):
        ip.load(str(path), device="cpu")
    ip.load(str(path), device="cpu", attn_implementation="sdpa")


def test_the_pocket_model_brings_no_code(nobody: None) -> None:
    assert not list(POCKET.glob("*.py"))


def test_a_gguf_file_is_asked_for_its_config_and_its_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether transformers can read it depends on a package; that it is asked does not."""
    given: list[tuple[str, Any]] = []
    own = type(ip.load("pocket", device="cpu").module)
    shutil.copytree(POCKET, tmp_path / "x")
    for kind in (transformers.AutoConfig, transformers.AutoTokenizer, own):
        name, real = kind.__name__, kind.from_pretrained

        def read(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            given.append((name, options.pop("gguf_file", None)))
            return real(*args, **options)

        monkeypatch.setattr(kind, "from_pretrained", read)
    ip.load(str(tmp_path / "x"), gguf_file="x.gguf", device="cpu")
    assert {(kind, "x.gguf") for kind in ("AutoConfig", "AutoTokenizer", own.__name__)} <= set(
        given
    )
