"""Makes the files in ``tests/sae/saelens``: autoencoders that SAELens itself saved, and what it encodes with them.

Run once, with SAELens 6.54.12, in an environment of its own (it needs transformer-lens below 4):

    pip install sae-lens==6.54.12 "transformer-lens<4" torch==2.13.0
    python tests/sae/saelens_files.py

Every parameter is random, so that none is without an effect; ``expected.safetensors`` has vectors ``x``, what SAELens
loads the folder and encodes them to (``codes``), and its output (``out``).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "saelens"
D_IN, D_SAE, D_OUT = 6, 14, 5

INFERENCE: dict[str, dict[str, Any]] = {
    "standard": {},
    "standard_layer_norm": {"normalize_activations": "layer_norm"},
    "standard_constant_norm": {"normalize_activations": "constant_norm_rescale"},
    "standard_bias_left_on": {"apply_b_dec_to_input": False},
    "gated": {},
    "topk": {"k": 3},
    "topk_by_norm": {"k": 3, "rescale_acts_by_decoder_norm": True},
    "abstopk": {"k": 3},
    "jumprelu": {},
    "matching_pursuit": {"max_iterations": 4, "residual_threshold": 0.1},
    "transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
    "skip_transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
    "jumprelu_transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
    "jumprelu_skip_transcoder": {"d_out": D_OUT, "apply_b_dec_to_input": False},
}
TRAINING: dict[str, dict[str, Any]] = {
    "batchtopk": {"k": 3},
    "matryoshka_batchtopk": {"k": 3, "matryoshka_widths": [4, 9]},
}
OLD = {  # what versions before 6.0 wrote
    "architecture": "standard",
    "d_in": D_IN,
    "d_sae": D_SAE,
    "dtype": "torch.float32",
    "device": "cpu",
    "model_name": "gpt2-small",
    "hook_name": "blocks.3.hook_resid_pre",
    "hook_layer": 3,
    "hook_head_index": None,
    "activation_fn_str": "topk",
    "activation_fn_kwargs": {"k": 4},
    "apply_b_dec_to_input": True,
    "finetuning_scaling_factor": False,
    "sae_lens_training_version": None,
    "prepend_bos": True,
    "dataset_path": "some/text",
    "dataset_trust_remote_code": True,
    "context_size": 128,
    "normalize_activations": "none",
}


def shaken(sae: Any, seed: int) -> Any:
    """An autoencoder with random numbers everywhere, thresholds and norms that tell."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sae.named_parameters():
            drawn = torch.randn(parameter.shape, generator=made)
            parameter.copy_(drawn.abs() * 0.5 if "threshold" in name else drawn * 0.6)
    return sae


def expected(folder: Path, seed: int) -> None:
    """What SAELens makes of a folder."""
    from sae_lens import SAE  # type: ignore[import-not-found]
    from safetensors.torch import save_file

    sae = SAE.load_from_disk(folder, device="cpu")
    x = torch.randn(5, D_IN, generator=torch.Generator().manual_seed(1000 + seed))
    with torch.no_grad():
        codes = sae.encode(x)
        found = {"x": x, "codes": codes, "out": sae(x)}
    save_file(
        {name: one.contiguous() for name, one in found.items()}, folder / "expected.safetensors"
    )


def main() -> None:
    """Write all of them."""
    from sae_lens.registry import get_sae_class, get_sae_training_class
    from safetensors.torch import save_file

    shutil.rmtree(FOLDER, ignore_errors=True)
    about = {"model_name": "gpt2", "hook_name": "blocks.1.hook_resid_post", "prepend_bos": True}
    for seed, (name, options) in enumerate(INFERENCE.items()):
        architecture = next(a for a in (name, name.split("_")[0]) if a in _known())
        kind, config = get_sae_class(architecture)
        cfg = config(d_in=D_IN, d_sae=D_SAE, dtype="float32", device="cpu", **options)
        for key, value in about.items():
            setattr(cfg.metadata, key, value)
        shaken(kind(cfg), seed).save_model(FOLDER / name)
        expected(FOLDER / name, seed)
    for seed, (name, options) in enumerate(TRAINING.items(), 100):
        kind, config = get_sae_training_class(name)
        sae = shaken(
            kind(config(d_in=D_IN, d_sae=D_SAE, dtype="float32", device="cpu", **options)), seed
        )
        sae.topk_threshold.fill_(0.7)
        sae.save_inference_model(FOLDER / name)
        expected(FOLDER / name, seed)
        sae.save_model(FOLDER / f"{name}_in_training")
        # The same vectors give the same codes as the file for inference.
        shutil.copy(FOLDER / name / "expected.safetensors", FOLDER / f"{name}_in_training")
    old = FOLDER / "before_6"
    old.mkdir(parents=True)
    (old / "cfg.json").write_text(json.dumps(OLD, indent=1))
    made = torch.Generator().manual_seed(7)
    sizes = {"W_enc": (D_IN, D_SAE), "W_dec": (D_SAE, D_IN), "b_enc": (D_SAE,), "b_dec": (D_IN,)}
    weights = {key: torch.randn(size, generator=made) for key, size in sizes.items()}
    save_file({**weights, "scaling_factor": torch.ones(D_SAE)}, old / "sae_weights.safetensors")
    expected(old, 7)


def _known() -> set[str]:
    return {"standard", "topk", "gated", "jumprelu", "abstopk", "matching_pursuit"} | {
        name for name in INFERENCE if "transcoder" in name
    }


if __name__ == "__main__":
    main()
