"""A zoo of small modules, one for each way in which networks surprise those who hook them.

Every case is deterministic: for a dtype, always the same inputs and the same random parameters.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module and its inputs; ``traps`` says what is peculiar, ``training`` how it runs."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], Inputs]
    traps: tuple[str, ...] = ()
    training: bool = False

    def __str__(self) -> str:
        return self.name

    def module(self, dtype: torch.dtype) -> nn.Module:
        """A new module: random parameters and buffers, converted to a dtype."""
        torch.manual_seed(0)
        module = self.build()
        randomise(module)
        return module.to(dtype).train(self.training)


CASES: dict[str, Case] = {}


def case(
    name: str,
    inputs: Callable[[torch.dtype], Inputs],
    *traps: str,
    training: bool = False,
    **arguments: Any,
) -> Callable[[Any], Any]:
    """Enter a module class (or a function that builds one) in the zoo."""

    def enter(build: Any) -> Any:
        assert name not in CASES
        bound = functools.partial(build, **arguments)
        CASES[name] = Case(name=name, build=bound, inputs=inputs, traps=traps, training=training)
        return build

    return enter


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 1) -> None:
    """Give every parameter random numbers: zeros and ones hide missing effects."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device="cpu").to(like)

    for name, parameter in module.named_parameters():
        around = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
        parameter.copy_(around + 0.4 * noise(parameter))
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var", "memory")):
            buffer.copy_(0.1 + noise(buffer).abs())


def default_device() -> torch.device:
    """The one that tests run on; torch 2.6 cannot tell it after it was set to None."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def floats(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], Inputs]:
    """Positional random inputs of these shapes."""

    def make(dtype: torch.dtype) -> Inputs:
        generator = torch.Generator("cpu").manual_seed(2)
        drawn = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
        return tuple(one.to(default_device(), dtype) for one in drawn), {}

    return make


def named(**shapes: tuple[int, ...]) -> Callable[[torch.dtype], Inputs]:
    """Random inputs of these shapes by keyword."""
    make = floats(*shapes.values())
    return lambda dtype: ((), dict(zip(shapes, make(dtype)[0])))


def tokens(dtype: torch.dtype) -> Inputs:
    """Two rows of five token numbers below 11."""
    return (torch.tensor([[1, 5, 2, 7, 3], [4, 4, 9, 0, 10]]),), {}


# Plain networks.


@case("mlp", floats((3, 4)))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


@case("cnn_batchnorm_eval", floats((2, 3, 6, 6)))
@case("cnn_batchnorm_train", floats((2, 3, 6, 6)), "buffers change in forward", training=True)
def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


@case("group_and_layer_norm", floats((2, 6, 5)))
def norms() -> nn.Module:
    return nn.Sequential(
        nn.GroupNorm(3, 6), nn.Linear(5, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 3)
    )


@case("autoencoder", floats((3, 8)))
class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        return self.decoder(code), code


@case("unet", floats((2, 2, 8, 8)))
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        # Not ConvTranspose2d: in bfloat16 it stops the process on some CPUs.
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 3, 1))
        self.top = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(6, 2, 1))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        high = self.act(self.down(x))
        low = self.act(self.deep(high))
        return self.top(torch.cat([self.act(self.up(low)), high], dim=1)) + x


@case("gan", floats((3, 4), (3, 6)))
class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 6))
        self.discriminator = nn.Sequential(
            nn.Linear(6, 5), nn.LeakyReLU(), nn.Linear(5, 1), nn.Sigmoid()
        )

    def forward(self, noise: Tensor, real: Tensor) -> dict[str, Tensor]:
        fake = self.generator(noise)
        return {"fake": self.discriminator(fake), "real": self.discriminator(real)}


@case("nested_containers", floats((3, 4)))
class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
            for _ in range(2)
        )
        self.heads = nn.ModuleDict(
            {"left": nn.Linear(4, 2), "right": nn.ModuleList([nn.Linear(4, 2)])}
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = x + stage(x)
        return self.heads["left"](x) * self.heads["right"][0](x)


@case("multihead_attention", floats((2, 4, 6)))
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(6, 2, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attn(x, x, x)
        return self.fc(out), weights


@case(
    "transformer_encoder_eval", floats((2, 4, 6)), "a fused path without gradients calls no child"
)
@case("transformer_encoder_train", floats((2, 4, 6)), training=True)
def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=7, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Linear(6, 3))


# Working in place.


@case("resnet_block", floats((2, 3, 5, 5)), "in-place ReLU called twice")
class ResNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


@case("inplace_relu_with_skip", floats((3, 4)), "in-place ReLU whose input goes on too")
class InplaceSkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        y = self.act(x)
        return self.fc2(y + x)


@case("inplace_act_ignored", floats((3, 4)), "what the in-place activation returns is dropped")
class InplaceIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.act = nn.ELU(inplace=True)
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        self.act(x)
        return self.fc2(x)


@case("inplace_arithmetic", floats((3, 4)), "the model writes to what a module returned")
class InplaceArithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h += 1
        h.mul_(0.5)
        return self.fc2(h) + h


@case("inplace_on_the_callers_input", floats((3, 4)), "the model writes to its own argument")
class InplaceInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(x)) + x.sum()


@case(
    "inplace_after_identity",
    floats((3, 4)),
    "eval dropout returns its input, then += writes to both",
)
class InplaceAfterIdentity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.drop = nn.Dropout()
        self.fc2 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        h = self.drop(x)
        h += 1
        return self.fc2(h) * x


@case("views_written_in_place", floats((3, 4)), "writing to a view changes what it is a view of")
class InplaceView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.halves = Halves()
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        left, _ = self.halves(x)
        left.mul_(2)
        return self.fc2(x)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[..., :2], x[..., 2:]


# Random and stateful.


@case("dropout_eval", floats((3, 4)), "dropout that returns its input")
@case("dropout_train", floats((3, 4)), "random numbers", training=True)
def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.AlphaDropout(0.3), nn.Linear(6, 3)
    )


@case("buffer_updated", floats((3, 4)), "a buffer is written in forward")
class Updates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("memory", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.memory.mul_(0.9).add_(h.detach().mean(0))
        return h - self.memory.clone()


@case("buffer_rebound", floats((3, 4)), "a buffer is replaced in forward")
class Rebinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(1))
        self.register_buffer("memory", torch.zeros(4))

    steps: Tensor
    memory: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.steps = self.steps + 1
        self.memory = self.memory + h.detach().amax(0)
        return h * self.steps + self.memory


@case("spectral_norm_train", floats((3, 4)), "parametrised weight, buffers change", training=True)
def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3))


@case("weight_norm", floats((3, 4)), "a module below .parametrizations makes the weight")
def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3))


# Called several times, or not at all.


class Last(nn.Module):
    """Takes the output of a recurrent layer apart."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        out, state = self.layer(x)
        return self.head(out), state


@case("lstm", floats((2, 3, 4)), "output is a nested tuple", layer=nn.LSTM)
@case("gru", floats((2, 3, 4)), "output is a tuple", layer=nn.GRU)
@case("rnn", floats((2, 3, 4)), "output is a tuple", layer=nn.RNN)
def recurrent(layer: Callable[..., nn.Module]) -> nn.Module:
    return Last(layer(4, 5, batch_first=True))


@case(
    "packed_sequence",
    floats((2, 3, 4)),
    "input and output are a named tuple with a constructor of its own",
)
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(pack_padded_sequence(x, [3, 2], batch_first=True))
        return self.head(out.data).sum(0) + self.head(last[0]).sum(0)


@case("handwritten_cell", floats((2, 3, 4)), "one cell, several calls")
class HandwrittenRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 5)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_input = nn.Linear(4, 5)
        self.of_state = nn.Linear(5, 5)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.of_input(x) + self.of_state(h))


@case("lstm_cell", floats((2, 3, 4)), "a tuple from each of several calls")
class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] * state[1]


@case("shared_module", floats((3, 4)), "one module under two names")
class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@case("tied_weights", tokens, "one parameter in two modules")
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.fc = nn.Linear(4, 4)
        self.unembed = nn.Linear(4, 11, bias=False)
        self.unembed.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.unembed(torch.tanh(self.fc(self.embed(ids))))


class Recursion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.fc(x))
        return x if depth == 0 else self(x, depth - 1) + x


@case("recursive_child", floats((3, 4)), "a module calls itself")
def recursive_child() -> nn.Module:
    return nn.Sequential(Recursion(), nn.Linear(4, 3))


CASES["recursive_root"] = Case(
    name="recursive_root", build=Recursion, inputs=floats((3, 4)), traps=("the model calls itself",)
)


@case("branch_taken", floats((3, 4)), "which child runs depends on the data", sign=1.0)
@case("branch_not_taken", floats((3, 4)), "which child runs depends on the data", sign=-1.0)
class Branch(nn.Module):
    def __init__(self, sign: float) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.sign = sign
        self.positive = nn.Linear(4, 3)
        self.negative = nn.Sequential(nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.positive(x) if (x.square().sum() * self.sign) > 0 else self.negative(x)


@case("forward_called_directly", floats((3, 4)), "child.forward(x) runs no hooks")
class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1.forward(x))


@case("weight_used_directly", floats((3, 4)), "F.linear(x, child.weight) runs no hooks")
class WeightOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.linear(x, self.fc1.weight))


# What modules return.


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Result:
    value: Tensor
    parts: list[Tensor]
    note: str = "as it was"


@dataclass(frozen=True)
class FrozenResult:
    value: Tensor
    parts: tuple[Tensor, ...]


class Twice(nn.Module):
    """Two layers, and a function that packs what they give."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        h = self.fc1(x)
        return self.pack(h, self.fc2(h))


class Unpacks(nn.Module):
    """A child that returns a container, and a head on each of its two tensors."""

    def __init__(
        self, pack: Callable[[Tensor, Tensor], Any], unpack: Callable[[Any], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.body = Twice(pack)
        self.unpack = unpack
        self.head = nn.Linear(4, 3)
        self.repack = pack

    def forward(self, x: Tensor) -> Any:
        left, right = self.unpack(self.body(x))
        return self.repack(self.head(left), torch.tanh(self.head(right)))


def _model_output(left: Tensor, right: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=left, hidden_states=(right, left * 2))


def _container(
    name: str, pack: Callable[[Tensor, Tensor], Any], unpack: Callable[[Any], tuple[Tensor, Tensor]]
) -> None:
    build = functools.partial(Unpacks, pack, unpack)
    CASES[name] = Case(name=name, build=build, inputs=floats((3, 4)), traps=("container",))


_container("tuple_output", lambda a, b: (a, b), lambda out: out)
_container(
    "dict_output", lambda a, b: {"a": a, "odd key": b}, lambda out: (out["a"], out["odd key"])
)
_container(
    "ordered_dict_output", lambda a, b: OrderedDict(b=b, a=a), lambda out: (out["a"], out["b"])
)
_container("integer_keys_output", lambda a, b: {7: a, 9: b}, lambda out: (out[7], out[9]))
_container("list_output", lambda a, b: [a, b], lambda out: (out[0], out[1]))
_container(
    "nested_output",
    lambda a, b: (a, (b, [a * 2, {"x": b}])),
    lambda out: (out[0], out[1][1][1]["x"]),
)
_container("namedtuple_output", lambda a, b: Pair(a, b), lambda out: (out.left, out.right))
_container(
    "dataclass_output", lambda a, b: Result(a, [b, a]), lambda out: (out.value, out.parts[0])
)
_container(
    "frozen_dataclass_output",
    lambda a, b: FrozenResult(a, (b,)),
    lambda out: (out.value, out.parts[0]),
)
_container("model_output", _model_output, lambda out: (out.last_hidden_state, out.hidden_states[1]))
_container("none_in_tuple", lambda a, b: (None, a, "text", b, 3), lambda out: (out[1], out[3]))
_container("single_tensor_in_tuple", lambda a, b: (a + b, None), lambda out: (out[0], out[0]))
_container("same_tensor_twice", lambda a, b: (a, a, b), lambda out: (out[0] * out[1], out[2]))
_container(
    "return_types_output",
    lambda a, b: torch.max(a * b, dim=0, keepdim=True),
    lambda out: (out[0], out[0]),
)


@case("scalar_output", floats((3, 4)), "a 0-d tensor")
class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.mean = Mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.mean(self.fc(x)) * 2


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


@case("empty_batch", floats((0, 4)), "no elements at all")
def empty_batch() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))


@case("identity_in_residual", floats((3, 4)), "Identity returns its input, which goes on too")
class IdentityBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.branch = nn.Identity()
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(torch.tanh(self.branch(x)) + x)


@case("returns_its_input", floats((3, 4)), "also the model itself returns what it was given")
class ReturnsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.same(self.fc(x))


class Parts(nn.Module):
    """A child made from a function, between two layers."""

    def __init__(self, middle: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.middle = middle
        self.fc2 = last

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.middle(self.fc1(x)))


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@case("returns_a_view", floats((4, 4)), "a view of the input")
def returns_a_view() -> nn.Module:
    return Parts(Apply(lambda x: x[1:, ::2].reshape(3, 2)), nn.Linear(2, 3))


@case("strided_view", floats((4, 4)), "a view with holes between its elements")
def strided_view() -> nn.Module:
    return Parts(Apply(lambda x: x[:, 1:3]), nn.Linear(2, 3))


class ThenView(nn.Module):
    """Breaks unless the value it gets has the strides the model gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.transpose(1, 2).view(x.shape[0], -1))


@case("transposed_then_view", floats((2, 3, 4)), "strides that a later .view needs")
def transposed() -> nn.Module:
    return Parts(Apply(lambda x: x.transpose(1, 2)), ThenView())


@case("expanded", floats((3, 1, 4)), "stride 0: elements share memory")
def expanded() -> nn.Module:
    return Parts(Apply(lambda x: x.expand(3, 5, 4)), nn.Linear(4, 2))


@case("fused_qkv_chunks", floats((2, 3, 4)), "chunks are views of one projection")
class FusedQKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.chunk = Apply(lambda x: x.chunk(3, dim=-1))
        self.split = Apply(lambda x: x.split([2, 2], dim=-1))
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.chunk(self.qkv(x))
        a, b = self.split(v)
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ torch.cat([b, a], dim=-1)
        return self.proj(mixed)


@case("channels_last", lambda dtype: _channels_last(dtype), "memory format")
def channels_last() -> nn.Module:
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
    )
    return layers.to(memory_format=torch.channels_last)


def _channels_last(dtype: torch.dtype) -> Inputs:
    (x,), _ = floats((2, 3, 4, 4))(dtype)
    return (x.contiguous(memory_format=torch.channels_last),), {}


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(4, 4))
        self.imag = nn.Parameter(torch.randn(4, 4))

    def forward(self, z: Tensor) -> Tensor:
        real = z.real @ self.real - z.imag @ self.imag
        imag = z.real @ self.imag + z.imag @ self.real
        return torch.complex(real, imag)


@case("complex_numbers", floats((3, 4), (3, 4)), "complex values inside and out")
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = ComplexLinear()
        self.second = ComplexLinear()

    def forward(self, real: Tensor, imag: Tensor) -> tuple[Tensor, Tensor]:
        z = self.second(self.first(torch.complex(real, imag)))
        return z, z.real * z.imag


@case("returns_a_parameter", floats((3, 4)), "a leaf of the graph")
class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.prompt = Prompt()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.prompt()


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(4))

    def forward(self) -> Tensor:
        return self.value


@case("returns_a_buffer", floats((3, 4)), "no gradient of its own")
class ReturnsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.table(2)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(3, 4))

    def forward(self, row: int) -> Tensor:
        return self.memory[row]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


@case("custom_autograd_function", floats((3, 4)), "a backward pass written by hand")
def custom_autograd() -> nn.Module:
    return Parts(Apply(Cube.apply), nn.Linear(4, 2))


# What modules take.


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, *, hidden: Tensor, scale: Tensor) -> Tensor:
        return self.fc(hidden) * scale


@case("keyword_only", named(hidden=(3, 4), scale=(4,)), "no positional argument at all")
class CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = KeywordOnly()
        self.head = nn.Linear(4, 2)

    def forward(self, *, hidden: Tensor, scale: Tensor) -> Tensor:
        return self.head(input=self.inner(scale=scale, hidden=hidden))


@case("several_inputs", floats((3, 4), (3, 5)))
class SeveralInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Bilinear(4, 5, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.join(left, input2=right)))


class Sums(nn.Module):
    def forward(self, *parts: Tensor, weight: float = 1.0, **more: Tensor) -> Tensor:
        return sum(parts) * weight + sum(more.values(), start=torch.zeros_like(parts[0]))


@case("star_args", floats((3, 4), (3, 4), (3, 4)), "*args")
class StarArgs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()
        self.fc = nn.Linear(4, 2)

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        return self.fc(self.sums(first, *others, weight=0.5) * self.sums(first))


@case("star_kwargs", named(a=(3, 4), b=(3, 4)), "**kwargs")
class StarKwargs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()
        self.fc = nn.Linear(4, 2)

    def forward(self, **tensors: Tensor) -> Tensor:
        return self.fc(self.sums(tensors["a"], **tensors))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        x = self.fc(x)
        return scale * (x if mask is None else x * mask)


@case(
    "optional_none",
    lambda dtype: ((*floats((3, 4))(dtype)[0], None), {"scale": 0.5}),
    "None as an argument",
)
@case("default_arguments", floats((3, 4)), "arguments left out")
class Optionals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Optional()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 3.0) -> Tensor:
        return self.head(self.inner(x, mask, scale=scale)) + self.head(self.inner(x))


@case("list_argument", floats((3, 4), (3, 4)), "tensors in lists and dictionaries as arguments")
class ListArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(self.mix([x, y], {"scale": x, "unused": None}))


class Mix(nn.Module):
    def forward(self, parts: list[Tensor], options: dict[str, Any]) -> Tensor:
        return torch.stack(parts).sum(0) * options["scale"]


@case("embedding", tokens, "integers in")
def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3))


@case("argmax_inside", floats((3, 4)), "integers between modules")
class Argmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.choose = Apply(lambda x: x.argmax(-1))
        self.embed = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.embed(self.choose(x)) * x


@case(
    "bool_mask",
    lambda dtype: ((*floats((3, 4))(dtype)[0], torch.tensor([True, False, True])), {}),
    "bool in",
)
class BoolMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fill = Fill()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fill(self.fc(x), mask[:, None]) * x


class Fill(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask, -1.0)


# Names that get in the way.


@case(
    "children_called_input_and_output",
    floats((3, 4)),
    "`output` is a child, and the root's output is `.output`",
)
class Names(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(4, 4)
        self.output = nn.Sequential(OrderedDict(input=nn.Linear(4, 4), output=nn.Linear(4, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.output(torch.tanh(self.input(x))))


@case(
    "child_called_output_and_a_tuple",
    floats((3, 4)),
    "elements of the root beside a child called `output`",
)
class NamesAndTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = Twice(lambda a, b: (a, b))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.output(x)
        return left * 2, right + left


# Transformers, built from configurations.


@case("tiny_gpt2", tokens, "ModelOutput, a cache object among the outputs")
def tiny_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


@case("tiny_llama", tokens, "attention gets its input by keyword and returns (value, None)")
def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
