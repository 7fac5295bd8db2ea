"""Something else in some places of files: of JSON, of tensors, of bytes."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 10**12, 10**30, 0.5, 1e308, "", "z", "\ud800", "\x1b[2J", "*" * 200, [], [[]], [1, "a"], {},
    {"slice": [0, 10**12, None]}, {"range": [0, 10**12, 1]}, {"regex": "(a*)*", "flags": 0}, {"tensor": "x"},
    {"tensor": {"dtype": "int8", "shape": [10**9], "base64": ""}}, {"tuple": [1]}, {"ellipsis": True},
    {"float": "nan"}, {"mapping": [["a", 1]]}, {"cache": {}, "aliases": {}, "calls": {}},
    {"excluded": [{}]}, {"rotation": {"tensor": "x"}}, {"type": "zero", "site": "z"}, {"type": "at"},
)  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def changed(data: Any, draw: random.Random) -> Any:
    data = copy.deepcopy(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        path = draw.choice(places(data)[1:] or [()])
        if not path:
            return draw.choice(ODD)
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        if draw.random() < 0.2:
            del inner[path[-1]]
        else:
            inner[path[-1]] = copy.deepcopy(draw.choice(ODD))
    return data


def odd_tensor(tensor: Tensor, draw: random.Random) -> Tensor:
    """One that is like it and is not: in its numbers, its shape, its dtype."""
    tensor = tensor.real if tensor.is_complex() else tensor
    made = tensor.clone()
    if made.is_floating_point() and made.numel():
        made.reshape(-1)[draw.randrange(made.numel())] = draw.choice(
            (float("nan"), float("inf"), -1.0, 1e30, 0.0)
        )
    elif made.numel() and made.dtype != torch.bool:
        most = torch.iinfo(made.dtype)
        made.reshape(-1)[draw.randrange(made.numel())] = draw.choice((most.min, most.max, -1, 0, 7))
    other: list[Tensor] = [
        made,
        made,
        tensor.new_zeros(()),
        tensor.new_zeros(0),
        tensor.reshape(-1),
        tensor[None],
        tensor[:-1] if tensor.ndim else tensor,
        torch.cat([tensor, tensor]) if tensor.ndim else tensor,
        tensor.mT if tensor.ndim > 1 else tensor,
        tensor.new_zeros(3, 0, 2),
        tensor.to(draw.choice((torch.int8, torch.bool, torch.float16, torch.float64))),
        tensor.to(torch.complex64) if tensor.is_floating_point() else tensor.float(),
    ]
    return draw.choice(other).contiguous()


def changed_tensors(tensors: dict[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    """Tensors by name, some of them odd, missing, or under another name."""
    made = dict(tensors)
    for _ in range(draw.choice((1, 1, 2))):
        if not made:
            break
        name = draw.choice(sorted(made))
        act = draw.random()
        if act < 0.7:
            made[name] = odd_tensor(made[name], draw)
        elif act < 0.85:
            del made[name]
        else:
            made[draw.choice(("x", "", "W_dec", "scaling_factor", "../x\x1b[2J", "threshold"))] = (
                made.pop(name)
            )
    return made


def changed_bytes(path: Path, draw: random.Random) -> None:
    """Bytes that are others, that are gone, that are too many."""
    content = bytearray(path.read_bytes())
    act = draw.randrange(4)
    if act == 0 and content:
        for _ in range(draw.choice((1, 3, 30))):
            content[draw.randrange(len(content))] = draw.randrange(256)
    elif act == 1:
        del content[draw.randrange(len(content) + 1) :]
    elif act == 2:
        content += bytes(draw.randrange(256) for _ in range(draw.choice((1, 100))))
    elif content:  # where headers are
        for _ in range(4):
            content[draw.randrange(min(200, len(content)))] = draw.randrange(256)
    path.write_bytes(content)
