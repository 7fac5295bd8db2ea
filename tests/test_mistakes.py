"""What people get wrong, and what they are told: the page of mistakes, and what stands behind it."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import interpose as ip
from interpose import names
from interpose.engine.model import Model
from interpose.explain.calls import careful
from interpose.models.transformer import TransformerModel
from scripts import mistakes_page


def test_the_page_of_mistakes_has_what_each_gives() -> None:
    count = sum(len(lines.strip().splitlines()) for lines in mistakes_page.MISTAKES.values())
    assert count >= 60
    assert mistakes_page.PAGE.read_text() == mistakes_page.page(), (
        "run python -m scripts.mistakes_page"
    )


def told(call: Callable[[], Any], error: type[Exception] = TypeError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", ip.__all__)
def test_a_wrong_keyword_of_anything_exported_is_named_with_those_there_are(name: str) -> None:
    thing = getattr(ip, name)
    if isinstance(thing, type) and not inspect.isfunction(vars(thing).get("__init__")):
        return  # errors take what they say, and nothing else
    if not callable(thing):
        return
    words = inspect.signature(thing).parameters.values()
    if any(word.kind is word.VAR_KEYWORD for word in words):
        return  # what it does not know goes on to the model
    assert told(lambda: thing(nonsense_word=1)).startswith(
        f"ip.{name} has no argument 'nonsense_word'"
    )


def test_metrics_are_as_careful_and_stay_what_they_are() -> None:
    logit: Any = ip.metrics.logit
    assert told(lambda: logit(" a", place=1)).startswith("ip.metrics.logit has no")
    metric = ip.metrics.logit_difference(" a", " b", pos=-2)
    assert isinstance(metric, ip.metrics.logit_difference)
    assert pickle.loads(pickle.dumps(metric)) == metric


def test_arguments_that_are_missing_twice_or_too_many_are_counted() -> None:
    def function(model, texts, *, metric, layer=None):
        return (model, texts, metric, layer)

    call = careful(function, "ip.function")
    assert call(1, 2, metric=3) == (1, 2, 3, None)
    assert told(lambda: call(1)).startswith("ip.function also needs 'texts' and 'metric'.")
    assert told(lambda: call(1, 2, 3)).startswith("ip.function also needs 'metric'.")
    assert told(lambda: call(1, 2, 3, metric=4)) == (
        "ip.function takes 2 arguments by place; got 3. The rest by name: metric, layer."
    )
    assert told(lambda: call(1, model=2, metric=3)).startswith("ip.function has 'model' twice")
    assert told(lambda: call(1, 2, metric=3, layers=4)) == (
        "ip.function has no argument 'layers'; did you mean 'layer'?\n"
        "  It takes: model, texts, metric, layer."
    )


def test_a_type_error_from_inside_is_left_as_it_is() -> None:
    def function(value):
        return len(value)

    error = told(lambda: careful(function, "ip.function")(3))
    assert error == "object of type 'int' has no len()"


def test_functions_that_were_made_careful_can_still_be_pickled_and_inspected() -> None:
    assert pickle.loads(pickle.dumps(ip.sweep)) is ip.sweep
    assert "clean" in inspect.signature(ip.sweep).parameters
    assert inspect.signature(ip.zero).parameters["site"].kind.name == "POSITIONAL_OR_KEYWORD"


def test_asking_for_a_name_that_is_not_there_imports_no_torch() -> None:
    code = (
        "import sys, interpose\n"
        "try: interpose.zeros\nexcept AttributeError as error: said = str(error)\n"
        "assert 'did you mean ip.zero?' in said, said\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_only_models_of_transformers_have_is_known_by_name() -> None:
    ours = {name for name in dir(TransformerModel) if not name.startswith("_")}
    for name in ours - set(dir(Model)) - {"generation"}:
        assert names.of_transformers(name), f"{name} is missing in names.py"
    for name in names.kinds():
        assert names.of_transformers(name)
    assert not names.of_transformers("fc1")


def test_a_class_selects_all_modules_of_it() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model, x = ip.wrap(net), torch.randn(2, 4)
    _, cache = model.run_with_cache(x, names_filter=nn.Linear)
    assert list(cache) == ["0", "1.0"]
    assert list(model.run_with_cache(x, names_filter=[nn.Tanh, "0"])[1]) == ["0", "1.1"]
    assert torch.equal(cache["0"], net[0](x))


def test_a_class_selects_modules_of_a_transformer_by_their_paths() -> None:
    model = ip.load("pocket")
    _, cache = model.run_with_cache("The cat", names_filter=nn.LayerNorm)
    norms = [path for path, part in model.module.named_modules() if type(part) is nn.LayerNorm]
    assert list(cache) == norms


def test_an_error_inside_the_model_names_the_module_and_keeps_the_error() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(5, 4)))
    model = ip.wrap(net)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        model.run_with_cache(torch.randn(2, 4))
    assert caught.value.__notes__ == ["raised in '1.1' (Linear), which was given [2, 4] float32."]
    with pytest.raises(RuntimeError) as caught:
        net(torch.randn(2, 4))
    assert not hasattr(caught.value, "__notes__")  # the module itself stays as it is


def test_an_error_of_a_hook_names_the_hook_alone() -> None:
    model = ip.wrap(nn.Sequential(nn.Linear(4, 4)))

    def broken(value, hook):
        raise ValueError("oh")

    with pytest.raises(ValueError, match="oh") as caught:
        model.run_with_hooks(torch.randn(2, 4), fwd_hooks=[("0", broken)])
    assert len(caught.value.__notes__) == 1
    assert "broken" in caught.value.__notes__[0]
