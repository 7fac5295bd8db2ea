"""Training: the same bits as a loop written by hand, stopped or not; what it writes, leaves alone and refuses."""

from __future__ import annotations

import copy
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from interpose.dialects.transformer_lens import HookedTransformer, HookedTransformerConfig
from interpose.dialects.transformer_lens.train import HookedTransformerTrainConfig, train

COUNTING = (torch.arange(70)[:, None] + torch.arange(8)) % 11
ROWS = [{"tokens": row} for row in COUNTING]


def make_model() -> Any:
    sizes = {"n_layers": 1, "d_model": 16, "n_ctx": 8, "d_head": 8, "d_vocab": 11, "act_fn": "relu"}
    return HookedTransformer(
        HookedTransformerConfig.from_dict(sizes | {"seed": 0, "device": "cpu"})
    )


def config(**changes: Any) -> HookedTransformerTrainConfig:
    usual = {"num_epochs": 3, "batch_size": 16, "lr": 0.01, "seed": 5, "print_every": None}
    return HookedTransformerTrainConfig(**(usual | changes))


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


def orders(seed: int, epochs: int, rows: int) -> list[list[int]]:
    """The order of each epoch, as the module promises it: from the seed and the epoch alone."""
    return [
        torch.randperm(
            rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        ).tolist()
        for epoch in range(epochs)
    ]


def by_hand(model: Any, optimizer: Any, *, clip: float | None, warmup: int) -> list[float]:
    """The loop that a person would write."""
    losses, step, rate = [], 0, optimizer.param_groups[0]["lr"]
    for order in orders(5, 3, len(ROWS)):
        for start in range(0, len(order), 16):
            tokens = torch.stack([ROWS[at]["tokens"] for at in order[start : start + 16]])
            if warmup:
                optimizer.param_groups[0]["lr"] = rate * min(1.0, step / warmup)
            loss = model(tokens, return_type="loss")
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(list(model.parameters()), clip)
            optimizer.step()
            losses.append(loss.item())
            step += 1
    return losses


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({}, lambda w: torch.optim.Adam(w, lr=0.01)),
        ({"optimizer_name": "AdamW"}, lambda w: torch.optim.Adam(w, lr=0.01)),
        ({"weight_decay": 0.3}, lambda w: torch.optim.AdamW(w, lr=0.01, weight_decay=0.3)),
        (
            {"optimizer_name": "AdamW", "weight_decay": 0.3, "max_grad_norm": 0.1},
            lambda w: torch.optim.AdamW(w, lr=0.01, weight_decay=0.3),
        ),
        (
            {"optimizer_name": "SGD", "momentum": 0.9, "weight_decay": 0.01, "warmup_steps": 6},
            lambda w: torch.optim.SGD(w, lr=0.01, momentum=0.9, weight_decay=0.01),
        ),
        ({"optimizer_name": "SGD", "max_grad_norm": 0.2}, lambda w: torch.optim.SGD(w, lr=0.01)),
    ],
    ids=["Adam", "AdamW without decay", "Adam with decay", "AdamW", "SGD with all", "SGD"],
)
def test_it_is_the_loop_written_by_hand(settings: dict[str, Any], make: Any) -> None:
    ours, theirs = make_model(), make_model()
    before = weights_of(ours)
    assert train(ours, config(**settings), ROWS) is ours
    losses = by_hand(
        theirs,
        make(list(theirs.parameters())),
        clip=settings.get("max_grad_norm"),
        warmup=settings.get("warmup_steps", 0),
    )
    assert_same(weights_of(ours), weights_of(theirs))
    assert differ(weights_of(ours), before)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "change",
    [{"weight_decay": 0.1}, {"max_grad_norm": 0.1}, {"warmup_steps": 6}, {"seed": 6}, {"lr": 0.02}],
    ids=lambda change: next(iter(change)),
)
def test_each_setting_changes_the_outcome(change: dict[str, Any]) -> None:
    plain, changed = (
        train(make_model(), config(), ROWS),
        train(make_model(), config(**change), ROWS),
    )
    assert differ(weights_of(plain), weights_of(changed))


def test_the_loss_goes_down() -> None:
    model = make_model()
    before = model(COUNTING, return_type="loss").item()
    assert before > 0.9 * math.log(11)
    train(model, config(num_epochs=30), ROWS)
    assert model(COUNTING, return_type="loss").item() < 0.2


def test_a_loss_of_ones_own_takes_batches_of_anything() -> None:
    x = torch.randint(0, 11, (40, 8))
    seen: list[Any] = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return F.cross_entropy(model(batch[0])[:, -1], batch[1])

    train(make_model(), config(num_epochs=1), TensorDataset(x, x[:, 0]), loss)
    assert [len(batch[0]) for batch in seen] == [16, 16, 8]
    assert all(torch.equal(batch[0][:, 0], batch[1]) for batch in seen)
    (order,) = orders(5, 1, 40)
    assert torch.equal(torch.cat([batch[0] for batch in seen]), x[order])


def test_other_modules_train_too_and_keep_what_is_frozen() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    module[0].requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    data = TensorDataset(torch.randn(20, 4))
    train(module, config(), data, lambda model, batch: model(batch[0]).square().mean())
    after = module.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["1.weight"], before["1.weight"])
    assert all(weight.grad is None for weight in module.parameters())
    module.requires_grad_(False)
    with pytest.raises(ValueError, match="no weight of the model has requires_grad"):
        train(module, config(), data, lambda model, batch: model(batch[0]).mean())


class Noisy(Dataset[Tensor]):
    """Rows that are drawn when they are asked for."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, at: int) -> Tensor:
        return torch.randn(4) + at


def noisy_module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def noisy_loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("stop", [3, 5, 12], ids=["in an epoch", "between epochs", "at the end"])
def test_a_training_taken_up_again_ends_with_the_same_bits(stop: int, tmp_path: Path) -> None:
    settings = {"weight_decay": 0.1, "warmup_steps": 7, "max_grad_norm": 0.5, "save_dir": tmp_path}
    settings |= {"save_every": stop, "optimizer_name": "AdamW"}
    whole = train(make_model(), config(**settings), ROWS)
    other = make_model()
    for weight in other.parameters():
        weight.data.normal_()  # all of it comes from the checkpoint
    train(other, config(**settings), ROWS, resume_from=tmp_path / f"step_{stop}.pt")
    assert_same(weights_of(whole), weights_of(other))


def test_random_rows_and_dropout_are_drawn_again_alike(tmp_path: Path) -> None:
    settings = config(save_every=6, save_dir=tmp_path)
    whole = train(noisy_module(), settings, Noisy(), noisy_loss)
    torch.randn(17)  # the state outside does not matter
    again = train(noisy_module(), settings, Noisy(), noisy_loss)
    assert_same(whole.state_dict(), again.state_dict())
    taken_up = train(
        noisy_module(), settings, Noisy(), noisy_loss, resume_from=tmp_path / "step_6.pt"
    )
    assert_same(whole.state_dict(), taken_up.state_dict())
    other = train(noisy_module(), config(seed=6), Noisy(), noisy_loss)
    assert differ(whole.state_dict(), other.state_dict())


def test_the_random_numbers_of_others_go_on_as_if_nothing_was() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1, device="cpu"))
    torch.manual_seed(1)
    train(module, config(), Noisy(), noisy_loss)
    assert torch.equal(torch.randn(3), expected)


def test_checkpoints_are_whole_and_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    model = train(make_model(), config(save_every=4, save_dir=str(folder)), ROWS)
    # 70 rows in batches of 16 are 5 steps an epoch, 15 in all.
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_12.pt",
        "step_4.pt",
        "step_8.pt",
    ]
    state = torch.load(folder / "step_12.pt", weights_only=True)
    assert state["step"] == 12
    assert state["config"]["lr"] == 0.01
    assert state["model"].keys() == model.state_dict().keys()
    # A folder stands for its last checkpoint, by number rather than by name; more epochs may follow.
    for earlier in (4, 8):
        (folder / f"step_{earlier}.pt").write_bytes(b"not read")
    longer = train(make_model(), config(num_epochs=5), ROWS)
    assert_same(
        weights_of(longer),
        weights_of(train(make_model(), config(num_epochs=5), ROWS, resume_from=folder)),
    )


def test_a_checkpoint_that_could_not_be_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(state: Any, path: Any) -> None:
        save(state, path)
        if state["step"] == 8:
            path.write_bytes(b"half")
            raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        train(make_model(), config(save_every=4, save_dir=tmp_path), ROWS)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step_4.pt"]
    monkeypatch.undo()
    whole = train(make_model(), config(), ROWS)
    taken_up = train(make_model(), config(), ROWS, resume_from=tmp_path)
    assert_same(weights_of(whole), weights_of(taken_up))


def test_another_training_is_not_taken_up(tmp_path: Path) -> None:
    train(make_model(), config(save_every=5, save_dir=tmp_path), ROWS)
    place = tmp_path / "step_5.pt"
    expected = f"{place} is of another training: lr was 0.01 and is 0.02, rows was 70 and is 60."
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        train(make_model(), config(lr=0.02), ROWS[:60], resume_from=place)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint step_N\.pt in .*empty"):
        train(make_model(), config(), ROWS, resume_from=tmp_path / "empty")


def test_an_epoch_may_end_early(tmp_path: Path) -> None:
    train(make_model(), config(max_steps=2, save_every=1, save_dir=tmp_path), ROWS)
    assert len(list(tmp_path.glob("*.pt"))) == 6
    train(make_model(), config(max_steps=99, save_every=1, save_dir=tmp_path), ROWS)
    assert len(list(tmp_path.glob("*.pt"))) == 15


def test_a_bar_shows_the_loss_unless_none_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    train(make_model(), config(print_every=5), ROWS)
    out, err = capsys.readouterr()
    assert out == ""
    assert "15/15" in err
    assert "loss=" in err
    train(make_model(), config(), ROWS)
    assert capsys.readouterr() == ("", "")


def test_losses_are_logged_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    fake = SimpleNamespace(init=lambda **options: logged.append(options), log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(make_model(), config(wandb=True), ROWS)
    started, *steps = logged
    assert started["project"] == "easy-transformer"
    assert started["config"]["batch_size"] == 16
    assert [step["samples"] for step in steps[:6]] == [16, 32, 48, 64, 70, 16]
    assert [step["epoch"] for step in steps] == [1] * 5 + [2] * 5 + [3] * 5
    assert steps[-1]["train_loss"] < steps[0]["train_loss"]
    train(make_model(), config(wandb=True, wandb_project_name="mine"), ROWS)
    assert logged[16]["project"] == "mine"


def test_wandb_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    model = make_model()
    before = weights_of(model)
    with pytest.raises(
        ModuleNotFoundError, match=r"train with wandb=True needs wandb, .* pip install wandb"
    ):
        train(model, config(wandb=True), ROWS)
    assert_same(before, weights_of(model))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"optimizer_name": "Lion"},
            "no optimizer 'Lion': optimizer_name is one of Adam, AdamW, SGD.",
        ),
        ({"batch_size": 0}, "batch_size=0: give at least 1."),
        ({"num_epochs": 0}, "num_epochs=0: give at least 1."),
        ({"max_steps": 0}, "max_steps=0: give at least 1."),
        ({"print_every": 0}, "print_every=0: give at least 1."),
        ({"save_every": 0, "save_dir": "x"}, "save_every=0: give at least 1."),
        ({"save_every": 5}, "save_every=5, but no save_dir to save in: give one."),
    ],
)
def test_what_is_no_training_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config(**wrong)
    changed = config()
    for name, value in wrong.items():
        setattr(changed, name, value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train(make_model(), changed, ROWS)


def test_rows_without_tokens_need_a_loss() -> None:
    with pytest.raises(TypeError, match="a batch of this dataset is a list, not a mapping"):
        train(make_model(), config(), TensorDataset(torch.zeros(4, 8).long()))
    with pytest.raises(TypeError, match="is a dict with text, ids, not a mapping with 'tokens'"):
        train(make_model(), config(), [{"text": "a", "ids": 1}])
    with pytest.raises(ValueError, match="the dataset has no rows to train on"):
        train(make_model(), config(), [])
