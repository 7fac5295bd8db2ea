"""Linear maps as processing writes them: wide numbers in, the parameter's own memory out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from interpose.errors import Unsupported
from interpose.models.discovery.anatomy import Endpoint
from interpose.models.reach.lenses import Heads
from interpose.models.transformer import TransformerModel
from interpose.models.weights import views


def wide(tensor: Tensor) -> Tensor:
    """The numbers as float64, or float32 on a device that has no more."""
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Write numbers to a parameter, or to a view of one."""
    target.detach().copy_(value)


def matrix(endpoint: Endpoint) -> Tensor:
    """A linear map's weight, ``[in, out]``, in the parameter's memory."""
    return views.matrix(endpoint).detach()


def bias(endpoint: Endpoint) -> Tensor | None:
    """A linear map's bias, in the parameter's memory; None if it has none."""
    found = views.parameter(endpoint, "bias")
    return None if found is None else found.detach()


def add_to_bias(endpoint: Endpoint, summand: Tensor) -> None:
    """Add to a linear map's bias. One without a bias gets one, unless all there is to add is zero."""
    if not summand.any():
        return
    found = bias(endpoint)
    found = _new_bias(endpoint) if found is None else found
    put(found, wide(found) + summand)


def _new_bias(endpoint: Endpoint) -> Tensor:
    """A bias of zeros on a module that had none, if its forward adds it."""
    module, weight = endpoint.module, matrix(endpoint)
    made = nn.Parameter(weight.new_ones(weight.shape[1]))
    made.requires_grad_(bool(module.weight.requires_grad))
    module.register_parameter("bias", made)
    with torch.no_grad():
        nothing = weight.new_zeros(1, 1, weight.shape[0])
        added = type(module).forward(module, nothing)  # not as a call: no hook hears of it
    if not torch.equal(added.reshape(-1), made.detach()):
        module.register_parameter("bias", None)
        raise Unsupported(
            f"{endpoint.path} ({type(module).__name__}) adds no bias, and would need one."
        )
    put(made, torch.zeros_like(made))
    return made.detach()


def check_alone(model: TransformerModel, endpoint: Endpoint) -> None:
    """Refuse a weight that another module holds too: what is right for one is wrong for the other."""
    weight = views.parameter(endpoint, "weight")
    unembed = model.anatomy.unembed
    ends = unembed is not None and endpoint.module is unembed.module
    for path, module in model.module.named_modules():
        if module is endpoint.module or (ends and isinstance(module, nn.Embedding)):
            continue  # tied embeddings are untied before anything is written
        if any(p is weight for p in module._parameters.values()):
            raise Unsupported(f"{endpoint.path} shares its weight with {path}.")


# By head.


def to_heads(endpoint: Endpoint, heads: Heads) -> Tensor:
    """The weight of a projection to heads, ``[head, d_model, d_head]``, wide."""
    return wide(heads.read(matrix(endpoint), None)).permute(1, 0, 2)


def put_to_heads(endpoint: Endpoint, heads: Heads, value: Tensor) -> None:
    """Write what `to_heads` shows."""
    whole = matrix(endpoint)
    put(whole, heads.write(whole, value.permute(1, 0, 2).to(whole.dtype), None))


def heads_bias(endpoint: Endpoint, heads: Heads) -> Tensor:
    """The bias of a projection to heads, ``[head, d_head]``, wide; zeros where there is none."""
    found = bias(endpoint)
    whole = matrix(endpoint).new_zeros(matrix(endpoint).shape[1]) if found is None else found
    return wide(heads.read(whole, None))


def put_heads_bias(endpoint: Endpoint, heads: Heads, value: Tensor) -> None:
    """Write what `heads_bias` shows."""
    before = heads_bias(endpoint, heads)
    if torch.equal(before, value):
        return
    found = bias(endpoint)
    whole = _new_bias(endpoint) if found is None else found
    put(whole, heads.write(whole, value.to(whole.dtype), None))


def from_heads(endpoint: Endpoint, heads: Heads) -> Tensor:
    """The weight of the output projection, ``[head, d_head, d_model]``, wide."""
    return wide(heads.read(matrix(endpoint).T, None)).permute(1, 2, 0)


def put_from_heads(endpoint: Endpoint, heads: Heads, value: Tensor) -> None:
    """Write what `from_heads` shows."""
    whole = matrix(endpoint).T
    put(whole, heads.write(whole, value.permute(2, 0, 1).to(whole.dtype), None))
