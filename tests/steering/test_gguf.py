"""Control vectors of llama.cpp: a file of the gguf package is read, ours have its bytes, hostile ones are refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

import interpose as ip

# Written by gguf 0.19 as repeng does: fields of each type, and direction.3, .1, .2 with (0, 1, 2, 3, 4 - N) / 8.
FIXTURE = Path(__file__).parent / "control_vector.gguf"


def vector(*layers: int, model_type: str = "gpt2") -> ip.SteeringVector:
    rows = {layer: (torch.arange(5.0) - layer) / 8 for layer in layers}
    return ip.SteeringVector.of(rows, model_type=model_type)


def test_a_file_of_the_gguf_package_is_read() -> None:
    found = ip.SteeringVector.load(FIXTURE)
    assert (found.site, found.layers, found.model_type) == ("resid_post", [1, 2, 3], "gpt2")
    assert torch.equal(found.directions, vector(1, 2, 3).directions)


def test_ours_has_the_bytes_that_the_format_says(tmp_path: Path) -> None:
    path = vector(2, 1).save(tmp_path / "x.gguf")
    raw = path.read_bytes()

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 3)
    head += text("general.architecture") + struct.pack("<I", 8) + text("controlvector")
    head += text("controlvector.model_hint") + struct.pack("<I", 8) + text("gpt2")
    head += text("controlvector.layer_count") + struct.pack("<II", 4, 2)
    head += text("direction.1") + struct.pack("<IQIQ", 1, 5, 0, 0)
    head += text("direction.2") + struct.pack("<IQIQ", 1, 5, 0, 32)
    assert raw[: len(head)] == head
    start = -(-len(head) // 32) * 32
    assert raw[len(head) : start] == bytes(start - len(head))
    assert struct.unpack("<5f", raw[start : start + 20]) == tuple((n - 1) / 8 for n in range(5))
    assert struct.unpack("<5f", raw[start + 32 : start + 52]) == tuple(
        (n - 2) / 8 for n in range(5)
    )
    again = ip.SteeringVector.load(path)
    assert again.layers == [1, 2]
    assert torch.equal(again[2], vector(2)[2])


def test_what_llama_cpp_has_no_place_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ip.Unsupported, match=r"no place for the direction of layer 0\. .*only\(4\)"
    ):
        vector(0, 4).save(tmp_path / "x.gguf")
    other = ip.SteeringVector.of(torch.ones(5), layer=1, site="mlp_out")
    with pytest.raises(ip.Unsupported, match="this one is of 'mlp_out'"):
        other.save(tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_vector_of_another_kind_of_model_does_nothing_silently_nowhere() -> None:
    model = ip.load("pocket")
    found = ip.SteeringVector.load(FIXTURE)
    with pytest.raises(ip.EditShapeError, match="has 5 units"):
        found.must_be_of(model)
    with pytest.raises(ip.EditShapeError):
        model.run_with_hooks("The cat", hooks=[found.add(layer=1)])
    wide = ip.SteeringVector.of(torch.ones(192), layer=1, model_type="llama")
    with pytest.raises(ip.Unsupported, match="of a 'llama' model"):
        wide.must_be_of(model)


def test_hostile_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    right = FIXTURE.read_bytes()
    file = tmp_path / "x.gguf"
    cases = {
        b"": "is no GGUF file",
        b"GGML" + right[4:]: "is no GGUF file",
        right[:4] + struct.pack("<I", 1) + right[8:]: "of GGUF version 1",
        right[:8] + struct.pack("<Q", 2**62) + right[16:]: "announces 4611686018427387904 tensors",
        right[:16] + struct.pack("<Q", 2**40) + right[24:]: "announces 1099511627776 fields",
        right[:24] + struct.pack("<Q", 2**63) + right[32:]: "ends before all",
        right[:-30]: "has no bytes for 'direction.2'",
        right.replace(b"controlvector", b"llama_is_here"): "is a GGUF file of 'llama_is_here'",
        right.replace(b"direction.1", b"direction.0"): "direction.0, which llama.cpp",
        right.replace(b"direction.1", b"direction.2"): "has the tensor 'direction.2' twice",
        right.replace(b"direction.1", b"../../etc/1"): "has the tensor '../../etc/1', and no",
    }
    assert len(cases) == 11
    for raw, said in cases.items():
        file.write_bytes(raw)
        with pytest.raises(ip.FileError) as caught:
            ip.SteeringVector.load(file)
        assert said in str(caught.value), str(caught.value)
    spoiled = bytearray(right)
    spoiled[-32:-28] = struct.pack("<f", float("nan"))
    file.write_bytes(bytes(spoiled))
    with pytest.raises(ip.FileError, match="no finite numbers"):
        ip.SteeringVector.load(file)


def test_any_change_and_any_end_of_a_file_is_read_or_refused(tmp_path: Path) -> None:
    right, file = FIXTURE.read_bytes(), tmp_path / "x.gguf"
    drawn, said = random.Random(0), list[str]()
    for number in range(200):
        raw = bytearray(right)
        if number % 2:
            raw = raw[: drawn.randrange(len(raw))]
        for _ in range(drawn.randrange(1, 5)):
            if raw:
                raw[drawn.randrange(len(raw))] = drawn.choice(
                    [0, 1, 127, 255, drawn.randrange(256)]
                )
        file.write_bytes(bytes(raw))
        try:
            found = ip.SteeringVector.load(file)
        except ip.FileError as error:
            said.append(str(error))
        else:
            assert torch.isfinite(found.directions).all()
    assert 100 < len(said) < 200
    assert all(one.startswith(repr(str(file))) for one in said)
