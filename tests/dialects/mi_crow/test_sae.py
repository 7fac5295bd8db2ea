"""Autoencoders in mi-crow's words: training, concepts, texts and manipulations, each against its definition."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.dialects.mi_crow.language_model import LanguageModel
from interpose.dialects.mi_crow.mechanistic.sae import (
    ConceptDictionary,
    L1Sae,
    NeuronText,
    SaeTrainer,
    SaeTrainingConfig,
    TopKSae,
)
from interpose.dialects.mi_crow.mechanistic.sae.modules import (
    L1SaeTrainingConfig,
    TopKSaeTrainingConfig,
)
from interpose.dialects.mi_crow.store import LocalStore, StoreDataloader
from tests.bounds import assert_near
from tests.models import tiny
from tests.models.texts import tokenizer

MADE: list[LanguageModel] = []
TEXTS = [
    "the cat sat on the mat",
    "a dog ran",
    "the cat saw it",
    "when the dog ran the cat sat",
] * 3
LAYER = "transformer.h.1"


def language_model(folder: Path, **options: Any) -> LanguageModel:
    MADE.append(LanguageModel(tiny.build("gpt2"), tokenizer(**options), LocalStore(folder)))
    return MADE[-1]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """All hooks come off in the end."""
    yield
    while MADE:
        lm = MADE.pop()
        for hook in lm.layers.get_hooks():
            lm.layers.unregister_hook(hook)


def autoencoder(lm: LanguageModel, kind: str = "topk") -> Any:
    """Not trained, but its latents fire."""
    torch.manual_seed(0)
    sae: Any = TopKSae(48, 32, k=4) if kind == "topk" else L1Sae(48, 32)
    lm.attach_sae(sae, layer_signature=LAYER)
    return sae


def value_of(lm: LanguageModel, texts: list[str]) -> Any:
    """What the layer after the autoencoder's is given."""
    seen: list[torch.Tensor] = []
    handle = lm.model.transformer.ln_f.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach().clone())
    )
    lm.inference.execute_inference(texts)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["topk", "l1"])
def test_a_touched_concept_moves_the_value_by_its_change_times_its_row_and_nothing_else(
    tmp_path: Path, kind: str
) -> None:
    lm = language_model(tmp_path)
    plain = value_of(lm, TEXTS[:1])
    sae = autoencoder(lm, kind)
    assert torch.equal(value_of(lm, TEXTS[:1]), plain)  # attached, it changes no bit
    latents = sae.engine.encode(plain)
    unit = int(latents[0].mean(0).argmax())
    fires = latents[..., unit] > 0
    assert int(fires.sum()) > 0
    sae.concepts.manipulate_concept(neuron_idx=unit, scale=3.0)
    assert sae.concepts.get_manipulation_config() == {unit: {"scale": 3.0, "bias": 0.0}}
    moved = value_of(lm, TEXTS[:1])
    step = 2.0 * latents[..., unit, None] * sae.engine.rows[unit]
    assert_near(moved, plain + step)
    assert torch.equal(moved[~fires], plain[~fires])
    assert int((sae.concepts.manipulated(latents) != latents).any((0, 1)).sum()) == 1
    sae.concepts.manipulate_concept(neuron_idx=unit, bias=0.5)
    assert_near(value_of(lm, TEXTS[:1]), plain + 0.5 * sae.engine.rows[unit])
    sae.concepts.reset_manipulations()
    assert torch.equal(value_of(lm, TEXTS[:1]), plain)
    with pytest.raises(IndexError, match="out of bounds"):
        sae.concepts.manipulate_concept(48)


def test_without_controllers_concepts_change_nothing_and_are_still_seen(tmp_path: Path) -> None:
    lm = language_model(tmp_path)
    sae = autoencoder(lm)
    sae.concepts.multiplication[:] = 2.0
    changed, _ = lm.inference.execute_inference(TEXTS[:2])
    plain, _ = lm.inference.execute_inference(TEXTS[:2], with_controllers=False)
    assert float((changed.logits - plain.logits).abs().max()) > 1e-3
    seen = sae.tensor_metadata["neurons"]
    assert int((seen != 0).sum(-1).max()) <= 4  # as sparse as the autoencoder is
    lm.layers.unregister_hook(sae)
    bare, _ = lm.inference.execute_inference(TEXTS[:2])
    assert torch.equal(bare.logits, plain.logits)


def test_gradients_flow_through_a_manipulation(tmp_path: Path) -> None:
    lm = language_model(tmp_path)
    sae = autoencoder(lm)
    sae.concepts.multiplication[:] = 2.0
    tokens = lm.tokenize(TEXTS[:1])["input_ids"]
    sae.engine.zero_grad()
    lm.model(input_ids=tokens).logits.sum().backward()
    assert float(sae.engine.W_dec.grad.abs().max()) > 0


@pytest.mark.parametrize("kind", ["topk", "l1"])
def test_training_says_true_numbers_and_its_file_loads(tmp_path: Path, kind: str) -> None:
    lm = language_model(tmp_path)
    run = lm.activations.save_activations(TEXTS, LAYER, batch_size=4, run_name="texts")
    config: SaeTrainingConfig
    if kind == "topk":
        sae: Any = TopKSae(n_latents=48, n_inputs=32, k=9)
        config = TopKSaeTrainingConfig(epochs=40, batch_size=32, lr=3e-3, k=6, device="cpu")
    else:
        sae = L1Sae(n_latents=48, n_inputs=32)
        config = L1SaeTrainingConfig(epochs=40, batch_size=32, lr=3e-3, device="cpu")
    made = SaeTrainer(sae).train(
        store=lm.store, run_id=run, layer_signature=LAYER, config=config, training_run_id="t"
    )
    history = made["history"]
    assert made["training_run_id"] == "t"
    assert {"loss", "recon_mse", "r2", "l0", "l1", "dead_features_pct"} == set(history)
    assert all(len(one) == 40 for one in history.values())
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    vectors = torch.cat(list(StoreDataloader(lm.store, run, LAYER)))
    with torch.no_grad():
        left = (vectors - sae.forward(vectors)).square().sum()
        r2 = float(1 - left / (vectors - vectors.mean(0)).square().sum())
        l0 = float((sae.encode(vectors) != 0).sum(-1).float().mean())
    assert r2 > 0.5
    assert abs(made["r2"][-1] - r2) < 0.15  # that of the last epoch, while weights still move
    assert abs(made["l0"][-1] - l0) < 0.5 + 0.1 * l0
    assert 0 <= made["dead_features_pct"][-1] <= 100
    folder = tmp_path / "runs" / "t"
    assert json.loads((folder / "history.json").read_text()) == history
    again = type(sae).load(folder / "model.pt")
    if kind == "topk":
        assert (sae.k, again.k) == (6, 6)
        assert l0 <= 6
    assert torch.equal(again.encode(vectors), sae.encode(vectors))


def test_a_run_of_detectors_trains_without_its_padding(tmp_path: Path) -> None:
    from interpose.dialects.mi_crow.hooks import LayerActivationDetector

    lm = language_model(tmp_path)
    lm.layers.register_hook(LAYER, LayerActivationDetector(LAYER))
    lm.inference.infer_texts(TEXTS, run_name="seen", batch_size=4)
    sae = TopKSae(48, 32, k=4)
    config = SaeTrainingConfig(epochs=2, batch_size=16, device="cpu", max_batches_per_epoch=2)
    made = sae.trainer.train(lm.store, "seen", LAYER, config)
    assert len(made["loss"]) == 2
    assert all(torch.isfinite(torch.tensor(made["loss"])))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_top_texts_are_where_latents_fire_most_without_padding_and_special_tokens(
    tmp_path: Path, adds_bos: bool
) -> None:
    lm = language_model(tmp_path, adds_bos=adds_bos)
    plain, _ = lm.inference.execute_inference(TEXTS[:4])
    sae = autoencoder(lm)
    sae.concepts.enable_text_tracking(top_k=3)
    seen, _ = lm.inference.execute_inference(TEXTS[:4])
    assert torch.equal(seen.logits, plain.logits)  # looking perturbs nothing
    lm.inference.infer_texts(TEXTS[:4], batch_size=2)
    tops = sae.concepts.get_top_texts()
    sae.concepts.disable_text_tracking()
    assert len(tops) > 5
    for unit, texts in list(tops.items())[:6]:
        best: list[tuple[float, str, str]] = []
        for text in TEXTS[:4] * 2:
            tokens = lm.tokenize([text])["input_ids"]
            _, cache = lm.context.view.run_with_cache(tokens, names_filter=[("resid_post", 1)])
            latents = sae.engine.encode(cache["resid_post", 1])[0].detach()
            for at, token in enumerate(tokens[0].tolist()):
                if token > 2 and latents[at, unit] > 0:  # 0, 1, 2 are special
                    best.append((float(latents[at, unit]), text, lm.tokenizer.decode([token])))
        best.sort(key=lambda one: -one[0])
        assert_near(
            torch.tensor([one.score for one in texts]), torch.tensor([b[0] for b in best[:3]])
        )
        for one in texts:
            assert one.text in TEXTS
            tokens = lm.tokenize([one.text])["input_ids"][0]
            assert lm.tokenizer.decode([int(tokens[one.token_idx])]) == one.token_str
    unit = next(iter(tops))
    assert sae.concepts.get_top_texts_for_neuron(unit, top_m=1) == tops[unit][:1]
    lm.inference.execute_inference(["the park"])
    assert sae.concepts.get_top_texts() == tops
    sae.concepts.reset_top_texts()
    assert sae.concepts.get_top_texts() == {}


def test_text_tracking_needs_a_language_model() -> None:
    with pytest.raises(ValueError, match="attach_sae"):
        TopKSae(8, 4, k=2).concepts.enable_text_tracking()


def test_top_texts_are_written_as_csv_and_json(tmp_path: Path) -> None:
    lm = language_model(tmp_path)
    sae = autoencoder(lm)
    sae.concepts.enable_text_tracking(top_k=2, track_negative=True)
    lm.inference.execute_inference(TEXTS[:3])
    tops = sae.concepts.get_top_texts()
    text = sae.concepts.export_top_texts_to_csv(tmp_path / "t.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == sum(map(len, tops.values()))
    assert set(rows[0]) == {"neuron_idx", "text", "score", "token_str", "token_idx"}
    said = json.loads(sae.concepts.export_top_texts_to_json(tmp_path / "t.json").read_text())
    assert {int(unit) for unit in said} == set(tops)
    assert sae.concepts.get_bottom_texts_for_neuron(0)
    assert json.loads(sae.concepts.export_bottom_texts_to_json(tmp_path / "b.json").read_text())
    sae.concepts.disable_text_tracking()


def test_dictionaries_hold_one_name_for_each_latent(tmp_path: Path) -> None:
    names = ConceptDictionary(5, store=LocalStore(tmp_path))
    names.add(3, "doors", 0.5)
    with pytest.raises(IndexError, match="out of bounds"):
        names.add(5, "x", 0.1)
    assert [one and one.name for one in names.get_many([3, 4]).values()] == ["doors", None]
    names.save()
    assert ConceptDictionary(5).load(tmp_path).concepts_map == names.concepts_map
    (tmp_path / "c.csv").write_text("neuron_idx,concept_name,score\n1,low,0.1\n1,high,0.9\n")
    assert ConceptDictionary.from_csv(tmp_path / "c.csv", 5).get(1).name == "high"  # type: ignore[union-attr]
    old = {"1": [{"name": "low", "score": 0.1}, {"name": "high", "score": 0.9}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert ConceptDictionary.from_json(tmp_path / "old.json", 5).get(1).score == 0.9  # type: ignore[union-attr]
    (tmp_path / "bad.json").write_text('{"1": "x"}')
    with pytest.raises(ip.FileError, match="a name and a score"):
        ConceptDictionary.from_json(tmp_path / "bad.json", 5)
    texts = [[], [NeuronText(1.0, "the cat", 1, " cat")]]
    made = ConceptDictionary.from_llm(texts, 5, ask=lambda seen: (seen[0].token_str.strip(), 1.0))
    assert made.get(1).name == "cat"  # type: ignore[union-attr]
    with pytest.raises(NotImplementedError, match="give ask="):
        ConceptDictionary.from_llm(texts, 5)
    sae = TopKSae(5, 4, k=2)
    sae.attach_dictionary(names)
    sae.concepts.load_concepts_from_csv(tmp_path / "c.csv")
    assert sae.concepts.dictionary.get(1).name == "high"  # type: ignore[union-attr]


def test_files_of_other_things_are_refused(tmp_path: Path) -> None:
    sae = TopKSae(8, 4, k=2)
    sae.concepts.manipulate_concept(3, scale=2.0)
    file = sae.save("mine", tmp_path)
    assert file == tmp_path / "mine.pt"
    assert TopKSae.load(file).concepts.get_manipulation_config() == {3: {"scale": 2.0, "bias": 0.0}}
    with pytest.raises(ip.FileError, match="not a L1Sae"):
        L1Sae.load(file)
    torch.save({"x": 1}, tmp_path / "other.pt")
    with pytest.raises(ip.FileError, match=r"not what TopKSae\.save writes"):
        TopKSae.load(tmp_path / "other.pt")
    with pytest.raises(FileNotFoundError):
        TopKSae.load(tmp_path / "none.pt")
