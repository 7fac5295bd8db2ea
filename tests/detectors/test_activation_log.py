"""`ip.ActivationLog` against raw torch hooks on each text by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import interpose as ip
from tests.models.texts import speaking

pytestmark = pytest.mark.bits


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


def test_the_last_batch_is_kept_or_all_of_them_as_torch_hooks_see_them() -> None:
    module, batches = net(), torch.randn(5, 3, 4).unbind()
    seen: list[torch.Tensor] = []
    handle = module[0].register_forward_hook(lambda _, args, out: seen.append(out.detach().clone()))
    last, every = ip.ActivationLog("0"), ip.ActivationLog("0", keep="all")
    model = ip.wrap(module)
    with model.hooks([last, every]):
        for batch in batches:
            model(batch)
    handle.remove()
    assert torch.equal(last["0"], seen[-1])
    assert len(last.batches()) == 1
    assert all(map(torch.equal, every.batches(), seen))
    assert torch.equal(every.vectors(), torch.cat(seen))
    assert bool((seen[0] < 0).any())  # the ReLU in place would show
    assert every.metadata["0"] == {"forwards": 5, "shapes": [[3, 6]] * 5, "dtype": "float32"}
    assert last.metadata["0"]["forwards"] == 5
    assert not every.vectors().requires_grad


def test_what_was_kept_is_cleared_and_collected_anew() -> None:
    model, log = ip.wrap(net()), ip.ActivationLog("0", keep="all")
    handle = model.register(log)
    model(torch.randn(2, 4))
    log.clear()
    assert (log.metadata, dict(log.collected()), log.tensors) == ({}, {}, {})
    with pytest.raises(ip.NothingMatched, match="has kept nothing yet: run the model with it"):
        log.vectors()
    handle.disable()
    model(torch.randn(2, 4))
    handle.enable()
    model(torch.randn(3, 4))
    assert [len(batch) for batch in log.batches()] == [3]
    handle.remove()


def test_padding_is_left_out_and_each_text_has_the_vectors_it_has_alone() -> None:
    model = speaking("llama")
    texts = ["the cat sat", "the dog near the old car was red", "a"]
    for side in ("left", "right"):
        log = ip.ActivationLog(("resid_post", 1), keep="all")
        with torch.no_grad(), model.hooks([log]):
            for part in (texts[:2], texts[2:]):
                model(part, padding_side=side)
        alone = [model.run_with_cache(text, names_filter=("resid_post", 1))[1] for text in texts]
        expected = torch.cat([cache["resid_post", 1][0] for cache in alone])
        assert log.vectors().shape == expected.shape
        assert sum(batch.shape[:2].numel() for batch in log.batches()) > len(expected)
        torch.testing.assert_close(log.vectors(), expected, rtol=1e-4, atol=1e-5)


def test_what_the_model_takes_and_returns_is_kept_like_any_value() -> None:
    model = speaking("gpt2")
    log = ip.ActivationLog(["input.*", "output.logits"], keep="all")
    with torch.no_grad(), model.hooks([log]):
        logits = model(["the cat sat", "the"])
    tokens = model.to_tokens(["the cat sat", "the"])
    assert torch.equal(log["input.input_ids"], tokens)
    assert torch.equal(log["output.logits"], logits)
    real = log["input.attention_mask"] != 0
    assert int((~real).sum()) > 0
    assert torch.equal(log.vectors("input.input_ids"), tokens[real])
    assert torch.equal(log.vectors("output.logits"), logits[real])
    with pytest.raises(ValueError, match=r"say which site: 'input\.input_ids'"):
        log.vectors()
    with pytest.raises(ip.SiteNotFound, match=r"has nothing of 'x'; it has 'input\.input_ids'"):
        log.vectors("x")


def test_calls_of_a_module_that_runs_several_times_are_kept_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(self.cell(x))

    module, x = Twice(), torch.randn(2, 3)
    log = ip.ActivationLog("cell")
    ip.wrap(module).run_with_hooks(x, hooks=[log])
    first = module.cell(x)
    assert torch.equal(log["cell"], first)
    assert torch.equal(log["cell#1"], module.cell(first))


def test_several_detectors_and_controllers_of_one_site_run_in_the_order_they_came() -> None:
    model, x = ip.wrap(net()), torch.randn(2, 4)
    logs = [ip.ActivationLog("0", id=f"log-{number}") for number in range(3)]
    double = ip.FunctionHook("0", lambda value, hook: value * 2, id="double")
    more = ip.add("0", 1.0)
    model.run_with_hooks(x, hooks=[logs[0], double, logs[1], more, logs[2]])
    plain = model.module[0](x)
    assert torch.equal(logs[0]["0"], plain)
    assert torch.equal(logs[1]["0"], plain * 2)
    assert torch.equal(logs[2]["0"], plain * 2 + 1)
    other = ip.ActivationLog("0")
    model.run_with_hooks(x, hooks=[more, double, other])
    assert torch.equal(other["0"], (plain + 1) * 2)


def test_a_function_is_a_hook_with_an_id_that_can_be_switched_off() -> None:
    model, x = ip.wrap(net()), torch.randn(2, 4)
    handle = model.register(ip.FunctionHook("0", torch.zeros_like, id="silence"))
    log = ip.ActivationLog("0")
    model.run_with_hooks(x, hooks=[log])
    assert not log["0"].any()
    model.disable("silence")
    model.run_with_hooks(x, hooks=[log])
    assert torch.equal(log["0"], model.module[0](x))
    handle.remove()
    seen = []
    look = ip.FunctionHook("0", lambda grad, hook: seen.append(grad), "bwd", id="look")
    model.run_with_hooks(x, hooks=[look]).sum().backward()
    assert len(seen) == 1
    with pytest.raises(ValueError, match="dir is 'fwd' or 'bwd'"):
        ip.FunctionHook("0", torch.zeros_like, "up")


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"dtype": torch.float64}])
def test_values_are_kept_in_another_dtype(options: dict[str, Any]) -> None:
    model, x = ip.wrap(net()), torch.randn(2, 4)
    log = ip.ActivationLog("0", **options)
    with torch.inference_mode():
        model.run_with_hooks(x, hooks=[log])
    assert torch.equal(log["0"], model.module[0](x).detach().to(options["dtype"]))
    assert not log["0"].is_inference()


def test_all_that_is_on_a_model_is_saved_with_one_call_and_read_back(tmp_path: Path) -> None:
    model = speaking("gpt2")
    log = ip.ActivationLog(("resid_post", 0), keep="all", id="stream")
    top = ip.TopActivating(("post", 1), k=2, context=1, id="top")
    model.register(log)
    model.register(top)
    model.register(ip.zero("z", layer=0))
    with torch.no_grad():
        model(["the cat sat", "the dog"])
        model("a red car")
    ip.save_collected(tmp_path / "found", model)
    model.remove_all_hook_fns()
    found = ip.load_collected(tmp_path / "found")
    assert list(found) == ["stream", "top"]
    assert [one.kind for one in found.values()] == ["ActivationLog", "TopActivating"]
    for one, detector in zip(found.values(), (log, top)):
        assert one.metadata == detector.metadata
        assert one.tensors.keys() == detector.collected().keys()
        for name, tensor in detector.collected().items():
            assert torch.equal(one.tensors[name].nan_to_num(-7), tensor.nan_to_num(-7)), name
    assert torch.equal(found["stream"].tensors["blocks.0.hook_resid_post/1"], log.batches()[1])
    log.clear()
    ip.save_collected(tmp_path / "found", [log])
    assert ip.load_collected(tmp_path / "found")["stream"].tensors == {}
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["collected.json"]


def test_what_cannot_be_saved_is_refused_before_a_file_is_touched(tmp_path: Path) -> None:
    log = ip.ActivationLog("0", id="mine")
    with pytest.raises(ValueError, match="two detectors have the id 'mine'"):
        ip.save_collected(tmp_path, [log, ip.ActivationLog("1", id="mine")])
    log.metadata["x"] = torch.zeros(1)
    with pytest.raises(TypeError, match="metadata of detector 'mine' is not what JSON holds"):
        ip.save_collected(tmp_path, log)
    with pytest.raises(TypeError, match="save_collected takes collectors"):
        ip.save_collected(tmp_path, [ip.zero("0")])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match=r"it has no collected\.json"):
        ip.load_collected(tmp_path)
    (tmp_path / "collected.json").write_text('{"format": "interpose.edits"}')
    with pytest.raises(ip.FileError, match="is not what save_collected writes"):
        ip.load_collected(tmp_path)


HEAD = '{"format": "interpose.collected", "version": 1, "detectors": '
ONE = HEAD + '[{"id": "a", "kind": "b", "metadata": '


@pytest.mark.parametrize(
    "text",
    [
        HEAD.replace("1", "9") + "[]}",
        HEAD + "3}",
        HEAD + '[{"id": "a"}]}',
        ONE + '1, "tensors": {}}]}',
        ONE + '{}, "tensors": {"x": []}}]}',
        ONE + '{}, "tensors": {"x": "0/x"}}]}',
    ],
)
def test_files_of_others_end_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "collected.json").write_text(text)
    with pytest.raises(ip.FileError, match=r"collected\.json"):
        ip.load_collected(tmp_path)
