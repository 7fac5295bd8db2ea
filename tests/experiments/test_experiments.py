"""Experiments: what they measure against raw runs, as files, as scripts that are really run, on the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose as ip
from interpose.cli.main import main

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
LEAD = ip.metrics.logit_difference(" Mary", " John")


@pytest.fixture(scope="module")
def model() -> ip.TransformerModel:
    return ip.load("pocket", device="cpu")


def plain(**words: Any) -> ip.Experiment:
    usual: dict[str, Any] = {
        "model": "pocket",
        "inputs": [CLEAN, CORRUPT],
        "edits": [ip.zero("z", layer=6, head=0), ip.scale("mlp_out", 0.5, layer=1, pos=" Mary")],
        "metrics": LEAD,
    }
    return ip.Experiment(**{**usual, **words})


def tensors() -> list[ip.Edit]:
    torch.manual_seed(0)
    return [
        ip.add("resid_post", torch.tensor([1.0]), layer=2),  # small: written out
        ip.add("resid_post", torch.randn(192), layer=3, pos=-1),
        ip.rotate("resid_pre", ip.Rotation(192, 3, seed=1), torch.randn(192), layer=4),
    ]


def swept(**words: Any) -> ip.Experiment:
    usual: dict[str, Any] = {
        "model": "pocket",
        "clean": CLEAN,
        "corrupt": CORRUPT,
        "metrics": LEAD,
        "sweep": {"site": "resid_pre", "over": ("layer", "pos"), "layer": range(0, 7, 3)},
    }
    return ip.Experiment(**{**usual, **words})


def ablation() -> ip.Experiment:
    words = {"over": ("layer", "head"), "layer": [5, 6], "edit": ip.scale("z", 0.5, pos=-1)}
    return swept(corrupt=None, sweep=words, metrics={"lead": LEAD, "kl": ip.metrics.kl()})


def standing() -> ip.Experiment:
    return swept(edits=[ip.zero("z", layer=6, head=[0, 4], pos=" to")])


# Numbers.


def test_what_is_measured_is_what_runs_by_hand_say(model: ip.TransformerModel) -> None:
    texts = [CLEAN, "The Eiffel Tower is in", CORRUPT]  # of different lengths, none padded
    edits = plain().edits[:1]
    metrics = {"lead": LEAD, "loss": ip.metrics.loss(), "kl": ip.metrics.kl()}
    result = ip.Experiment(model=model, inputs=texts, edits=edits, metrics=metrics).run()
    mary, john = model.to_single_token(" Mary"), model.to_single_token(" John")
    for number, text in enumerate(texts):
        tokens = model.to_tokens(text)
        with torch.no_grad():
            bare = model.module(tokens).logits[0]
            changed = model.run_with_hooks(text, hooks=edits)[0]
        for found, logits in ((result.without, bare), (result.edited, changed)):
            lead = logits[-1, mary] - logits[-1, john]
            loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
            kl = torch.nn.functional.kl_div(
                logits[-1].log_softmax(-1),
                bare[-1].log_softmax(-1),
                reduction="sum",
                log_target=True,
            )
            expected = torch.stack([lead, loss, kl])
            torch.testing.assert_close(found[:, number], expected, rtol=1e-4, atol=1e-4)
    assert result.effect[0, 0] < -1
    assert len(repr(result).splitlines()) == 2 + 3 * 4  # a line for each text, and their mean


def test_edits_that_speak_of_rows_need_one_batch(model: ip.TransformerModel) -> None:
    each = ip.scale("z", 0.0, layer=6, rows=[1])
    texts = [CLEAN, CORRUPT] * 10  # more than run together by default
    result = ip.measure(model, texts, LEAD, edits=[each])
    moved = (result.effect[0] != 0).nonzero().flatten().tolist()
    assert moved == [1]
    with pytest.raises(
        ValueError, match=r"rows=\[1\]\) speaks of rows of the batch, and texts of 5 to 14"
    ):
        ip.measure(model, [CLEAN, "The Eiffel Tower is in"], LEAD, edits=[each])
    strength = torch.zeros(20)
    strength[3] = 1
    graded = ip.zero("z", layer=6, strength=strength)
    moved = ip.measure(model, texts, LEAD, edits=[graded]).effect[0].nonzero().flatten().tolist()
    assert moved == [3]


@pytest.mark.parametrize(
    "edit",
    [
        ip.zero("z", layer=6, exclude={"rows": 1}),
        ip.zero("z", layer=6, at=(0,)),
        ip.clamp("resid_post", torch.zeros(2, 1, 192), layer=6),
        ip.mean("resid_post", torch.zeros(2, 1, 192), layer=6),
        ip.mean("resid_post", layer=6),
        ip.resample("resid_post", layer=6),
        ip.knockout(6, query=-1, key=torch.eye(14, dtype=torch.bool)[:2]),
    ],
    ids=repr,
)
def test_every_way_to_speak_of_rows_is_known(model: ip.TransformerModel, edit: ip.Edit) -> None:
    texts = [CLEAN, CORRUPT]
    one, both = (ip.measure(model, texts, LEAD, edits=[edit], batch_size=n) for n in (1, 2))
    assert torch.allclose(one.edited, both.edited, atol=1e-4)
    with pytest.raises(ValueError, match="speaks of rows of the batch"):
        swept(edits=[edit])


def test_means_of_caches_do_not_speak_of_rows(model: ip.TransformerModel) -> None:
    _, cache = model.run_with_cache([CLEAN, CORRUPT], names_filter=("resid_post", 6))
    for edit in (
        ip.mean("resid_post", cache, layer=6),
        ip.zero("z", layer=6, at=(..., 0)),
        ip.zero("z", layer=6, at=(slice(None), 0)),
    ):
        assert swept(edits=[edit]).edits == (edit,)


def test_edits_of_the_unembedding_have_all_positions(model: ip.TransformerModel) -> None:
    mary = model.to_single_token(" Mary")
    for pos, moved in ((0, 0.0), (-1, 5.0), (None, 5.0)):
        edit = ip.add("unembed.hook_out", 5.0, neuron=mary, pos=pos)
        found = ip.measure(model, [CLEAN], LEAD, edits=[edit]).effect
        assert float(found) == pytest.approx(moved, abs=1e-4)


def test_tokens_are_measured_and_told_as_lists(model: ip.TransformerModel) -> None:
    tokens = model.to_tokens([CLEAN, CORRUPT])
    result = ip.measure(model, tokens, LEAD)
    assert json.loads(json.dumps(result.to_dict()))["inputs"] == tokens.tolist()
    assert torch.equal(result.without, ip.measure(model, [CLEAN, CORRUPT], LEAD).without)
    alone = ip.measure(model, tokens[0], LEAD).without
    assert torch.allclose(alone, result.without[:, :1], atol=1e-4)
    for texts, metric, said in (([], LEAD, "there is no text"), ([CLEAN], {}, "empty mapping")):
        with pytest.raises(ValueError, match=said):
            ip.measure(model, texts, metric)


def test_without_edits_there_is_one_number_for_each_text(model: ip.TransformerModel) -> None:
    result = ip.measure(model, CLEAN, LEAD)
    assert result.edited is None
    assert result.names() == ("text", "value")
    assert not result.effect.any()
    model.train()
    try:
        with pytest.raises(ip.Unsupported, match="training mode"):
            ip.measure(model, CLEAN, LEAD)
    finally:
        model.eval()


def test_a_sweep_in_an_experiment_is_the_sweep(model: ip.TransformerModel) -> None:
    found = swept().run(model)
    own = ip.sweep(model, CLEAN, CORRUPT, metric=LEAD, layer=[0, 3, 6], progress=False)
    assert isinstance(found, ip.SweepResult)
    assert torch.equal(found.each, own.each)
    halved = ablation().run(model)
    assert isinstance(halved, ip.SweepResult)
    for layer, head in ((5, 0), (6, 3)):
        edit = ip.scale("z", 0.5, layer=layer, head=head, pos=-1)
        one = ip.measure(model, CLEAN, LEAD, edits=[edit]).edited
        assert one is not None
        assert float(halved.values[0, layer - 5, head]) == pytest.approx(float(one), abs=1e-4)


def test_edits_are_in_force_in_every_run_of_a_sweep(model: ip.TransformerModel) -> None:
    result = standing().run(model)
    assert isinstance(result, ip.SweepResult)
    edits = list(standing().edits)
    ends = [ip.measure(model, text, LEAD, edits=edits).edited for text in (CLEAN, CORRUPT)]
    torch.testing.assert_close([result.clean, result.corrupt], ends, rtol=1e-5, atol=1e-5)
    bare = swept().run(model)
    assert (result.each - bare.each).abs().max() > 1  # type: ignore[union-attr]
    _, cache = model.run_with_cache(CLEAN, names_filter="resid_pre", hooks=edits)
    for number, (layer, pos) in enumerate(((0, 9), (3, 9), (6, 13))):
        patch = ip.patch("resid_pre", cache, layer=layer, pos=pos)
        one = ip.measure(model, CORRUPT, LEAD, edits=[*edits, patch]).edited
        assert one is not None
        assert float(result.values[number, pos]) == pytest.approx(float(one), abs=1e-4)


# Equality, data, files.


def test_equal_experiments_are_equal_and_hash_alike() -> None:
    assert plain() == plain()
    assert len({plain(), plain(), plain(model="other")}) == 2
    assert plain(edits=tensors()).key == plain(edits=tensors()).key
    changed = tensors()
    changed[1] = ip.add("resid_post", changed[1].value + 1e-3, layer=3, pos=-1)  # type: ignore[attr-defined]
    others = [
        plain(edits=changed),
        plain(edits=tensors()[::-1]),
        plain(metrics={"metric": LEAD}),
        plain(inputs=[CLEAN]),
        plain(dtype="bfloat16"),
        plain(prepend_bos=True),
        swept(),
        swept(sweep={"over": "layer"}),
        ablation(),
    ]
    assert len({plain().key, plain(edits=tensors()).key, *(other.key for other in others)}) == 11
    assert plain() != 3
    code = plain(metrics=len)
    assert code == code
    assert code != plain(metrics=len)  # code is not compared
    with pytest.raises(ValueError, match="code is not saved"):
        code.to_dict()


@pytest.mark.parametrize("made", [plain, lambda: plain(edits=tensors()), swept, ablation, standing])
def test_an_experiment_comes_back_from_its_file(made: Any, tmp_path: Path) -> None:
    experiment, path = made(), tmp_path / "x.json"
    experiment.save(path)
    assert ip.Experiment.load(path) == experiment
    assert ip.Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment
    files = {file.name for file in tmp_path.iterdir()}
    assert len(files) == (2 if "tensor(" in repr(experiment) else 1)
    plain().save(path)  # tensors that nothing names any more go
    assert {file.name for file in tmp_path.iterdir()} == {"x.json"}


def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old = tmp_path / "x.json", plain(edits=tensors())
    old.save(path)
    real = Path.replace

    def fails(self: Path, target: Any) -> Path:
        if Path(target).suffix == ".json":
            raise OSError("no space left")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        plain(edits=tensors()[:2], inputs=[CLEAN]).save(path)
    assert ip.Experiment.load(path) == old
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_experiments_of_version_1_say_layers_and_direction_and_load(tmp_path: Path) -> None:
    words = {"layer": [5], "pos": [9], "head": [1], "neuron": [0], "patch": "corrupt"}
    over = {"site": "z", "over": ["layer", "head", "pos"]}
    old = {"layers": [5], "positions": [9], "heads": [1], "neurons": [0], "direction": "noise"}
    new, path = swept(sweep=over | words), tmp_path / "x.json"
    path.write_text(json.dumps({**new.to_dict(), "version": 1, "sweep": over | old}))
    assert ip.Experiment.load(path) == new
    path.write_text(json.dumps({**new.to_dict(), "sweep": over | old}))
    with pytest.raises(ValueError, match="sweep has a field 'layers', which is none of: site"):
        ip.Experiment.load(path)


def test_files_that_are_no_experiment_are_refused(tmp_path: Path) -> None:
    data = plain().to_dict()
    path = tmp_path / "x.json"
    for wrong, said in (
        ("nothing", "is not JSON"),
        ("[]", "holds no experiment, as"),
        ("{}", "holds no experiment, as"),
        (
            json.dumps({**data, "version": 9}),
            "of version 9, and this interpose reads versions 1 and 2",
        ),
        (json.dumps({**data, "seed": 1}), "has a field 'seed', which is none of: model"),
        (json.dumps({**data, "sweep": {"ovre": 1}}), "sweep has a field 'ovre', which is none of"),
        (
            json.dumps({**data, "edits": [{"type": "zap"}]}),
            r"edits\[0\].type is 'zap', and no edit is called so",
        ),
        (
            json.dumps({**data, "metrics": {"type": "zap"}}),
            "metrics.type is 'zap', and no metric is called so",
        ),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=said):
            ip.Experiment.load(path)


def test_experiments_that_mean_nothing_are_refused(model: ip.TransformerModel) -> None:
    for words, said in (
        ({"inputs": None}, "an experiment without a sweep has inputs="),
        ({"clean": CLEAN}, "clean= and corrupt= go with sweep="),
        ({"sweep": {}}, "a sweep has clean="),
        ({"metrics": {}}, "metrics have names"),
        ({"dtype": "float3"}, "no dtype 'float3'"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            plain(**words)
    with pytest.raises(TypeError, match="edits of an experiment are data"):
        plain(edits=[len])
    with pytest.raises(ValueError, match="a sweep makes its own batches"):
        swept(edits=[ip.zero("z", layer=1, rows=0)])
    with pytest.raises(ValueError, match="it names the sweep's site, and no layer"):
        swept(sweep={"site": "z", "edit": ip.zero("mlp_out")})
    with pytest.raises(ValueError, match="holds a TransformerModel itself"):
        plain(model=model).save("x.json")
    assert plain(model=model) == plain(model=model)
    assert plain(model=model) != plain()


# Scripts: really run, in a process of their own.


def printed(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "made",
    [lambda: plain(edits=tensors(), metrics={"lead": LEAD}), ablation, standing],
    ids=["tensors", "sweep", "edits"],
)
def test_the_script_prints_what_the_experiment_prints(
    made: Any, tmp_path: Path, model: ip.TransformerModel
) -> None:
    experiment, path = made(), tmp_path / "x.json"
    experiment.save(path)
    script = tmp_path / "x.py"
    script.write_text(experiment.to_python(path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    expected = f"{experiment.run(model)!r}\n"
    assert printed("-m", "interpose.cli.main", "run", str(path), folder=elsewhere) == expected
    title, *numbers = printed(str(script), folder=elsewhere).splitlines()
    assert numbers == expected.splitlines()[1:]
    # In a script the weights of a rotation are the tensor that they are.
    assert title.replace("tensor(3, 192)", "Rotation(units=192, k=3)") == expected.splitlines()[0]


def test_a_script_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="Save the experiment, and say where"):
        plain(edits=tensors()).to_python()
    assert plain().to_python().startswith("import interpose as ip\n\nmodel = ip.load('pocket')\n")
    assert "import torch\n" in plain(dtype="float32").to_python()
    assert plain(inputs=["torch.tensor re.x"]).to_python().count("import") == 1
    for made in (swept(prepend_bos=True), ablation(), standing()):
        compile(made.to_python(), "x", "exec")

    @dataclass(frozen=True, eq=False, repr=False)
    class flip(ip.Edit):
        def new(self, part: Any, spot: Any) -> Any:
            return -part

    with pytest.raises(ValueError, match="which a script would not know"):
        plain(edits=[flip("z", layer=1)]).to_python()


# The command line.


def test_the_command_line_sweeps_saves_and_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: ip.TransformerModel
) -> None:
    files = {name: str(tmp_path / f"{name}.{end}") for name, end in (("a", "html"), ("b", "json"))}
    saved = str(tmp_path / "c.json")
    asked = ["--clean", CLEAN, "--corrupt", CORRUPT, "--answer", " Mary", "--instead", " John"]
    asked += ["--device", "cpu", "--layer", "0,3", "--layer", "6"]
    wanted = ["--html", files["a"], "--json", files["b"], "--save", saved]
    assert main(["sweep", *asked, *wanted]) == 0
    out = capsys.readouterr().out
    result = ip.SweepResult.from_dict(json.loads(Path(files["b"]).read_text()))
    assert torch.equal(result.each, swept().run(model).each)  # type: ignore[union-attr]
    assert out.startswith(repr(result))
    assert " John" in Path(files["a"]).read_text()
    assert ip.Experiment.load(saved) == swept()
    assert main(["run", saved, "--device", "cpu", "--html", str(tmp_path / "d.html")]) == 0
    assert capsys.readouterr().out.startswith(repr(result))
    assert (tmp_path / "d.html").read_text() == Path(files["a"]).read_text()
    assert main(["run", saved, "--python"]) == 0
    assert capsys.readouterr().out == swept().to_python()
    heads = ["--site", "z", "--over", "layer,head", "--edit", "zero", "--device", "cpu"]
    assert main(["sweep", "--clean", CLEAN, "--answer", " Mary", *heads]) == 0
    assert "layer / head" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "a sweep needs --clean TEXT and --answer TOKEN"),
        (["--clean", CLEAN, "--answer", " Mary"], "nothing to patch from; or say --edit zero"),
        (["--clean", CLEAN, "--corrupt", "x", "--answer", " Mary"], "pair 0 has 14 and 1 tokens"),
        (["--clean", CLEAN, "--corrupt", CORRUPT, "--answer", " Mary Mary"], "is 2 tokens"),
        (["--clean", CLEAN, "--corrupt", CORRUPT, "--answer", " a", "--over", "x"], "over names"),
        (
            ["--clean", CLEAN, "--corrupt", CORRUPT, "--answer", " a", "--site", "x"],
            "no site 'blocks.0.hook_x'",
        ),
        (["--clean", CLEAN, "--answer", " a", "--edit", "add"], "needs nothing but a place"),
        (
            ["--clean", CLEAN, "--corrupt", CORRUPT, "--answer", " a", "--html", "x"],
            "ends in .html",
        ),
        (["--clean", CLEAN, "--corrupt", CORRUPT, "--answer", " a", "--dtype", "x"], "no dtype"),
    ],
)
def test_mistakes_on_the_command_line_are_told_without_a_traceback(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *asked]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_the_count_of_a_grid_is_at_most_a_thirteenth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--count"]) == 0
    out = capsys.readouterr().out
    assert "180 cells x 15 positions x 12 layers = 32,400 token-layers" in out
    together = re.search(r"together: +([\d,]+) token-layers in (\d+) forwards, 1/([\d.]+) of", out)
    assert together is not None
    count = int(together[1].replace(",", ""))
    assert 13 <= 32400 / count == pytest.approx(float(together[3]), abs=0.06)
    off, most = re.search(r"per cell: (\S+), on effects up to (\S+)", out).groups()  # type: ignore[union-attr]
    assert float(off) < 1e-4
    assert float(most) > 1e-2


def test_an_edit_of_a_sweep_does_not_choose_what_the_sweep_goes_over() -> None:
    with pytest.raises(ValueError, match=r"says which pos, and the sweep goes over 'pos': choose"):
        ip.Experiment(
            model="pocket",
            clean="The Eiffel Tower is in",
            metrics=ip.metrics.logit(" Paris"),
            sweep={"over": ["layer", "pos"], "edit": ip.zero("z", pos=-1)},
        )


def test_an_ablation_is_called_by_its_edit() -> None:
    experiment = ip.Experiment(
        model="pocket",
        clean="The Eiffel Tower is in",
        metrics=ip.metrics.logit(" Paris"),
        sweep={"over": ["layer", "head"], "edit": ip.zero("z")},
    )
    assert "zero at z" in repr(experiment.run())
