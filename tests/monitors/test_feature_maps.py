import struct

import pytest
import torch
from torch import nn

import interpose as ip
from interpose.monitors.feature_maps import feature_maps
from interpose.render import colours


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 10, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(90, 2)
    )


X = torch.randn(3, 1, 8, 9, generator=torch.Generator().manual_seed(1))


def test_values_are_those_of_the_module_for_the_example_and_channels_asked_for():
    module = net()
    with torch.no_grad():
        expected = module[1](module[0](X))
    found = feature_maps(ip.wrap(module), X, "1", example=2, channels=[4, 0])
    assert torch.equal(found["1"].values, expected[2, [4, 0]])
    assert found["1"].channels == (4, 0)
    with torch.no_grad():
        before = module[0](X)  # the ReLU after it works in place
    assert torch.equal(feature_maps(ip.wrap(module), X, "0")["0"].values, before[0])


def test_the_grid_has_one_tile_per_channel_with_gaps_of_one_white_pixel():
    found = feature_maps(ip.wrap(net()), X, "0", columns=4)
    pixels, values = found["0"].pixels(), found["0"].values
    height, width = 6, 7
    assert pixels.shape == (3 * (height + 1) - 1, 4 * (width + 1) - 1, 3)
    assert (pixels[height] == 255).all()
    assert (pixels[:, width] == 255).all()
    assert (pixels[2 * (height + 1) :, 2 * (width + 1) :] == 255).all()  # two places stay empty
    for channel in range(10):
        top, left = channel // 4 * (height + 1), channel % 4 * (width + 1)
        tile, value = pixels[top : top + height, left : left + width], values[channel]
        assert tuple(tile[value == value.min()][0].tolist()) == colours.sequential(0)
        assert tuple(tile[value == value.max()][0].tolist()) == colours.sequential(1)


def test_constant_and_broken_channels_are_grey():
    module = nn.Sequential(nn.Identity())
    x = torch.zeros(1, 3, 2, 2)
    x[0, 1, 0, 0] = torch.nan
    x[0, 2, 0, 0] = 1.0
    pixels = feature_maps(ip.wrap(module), x, "0")["0"].pixels()
    assert (pixels[:, :2] == 160).all()
    assert (pixels[:, 3:5] == 160).all()
    assert not (pixels[:, 6:] == 160).all(-1).any()


def test_it_saves_pictures_and_pages(tmp_path):
    found = feature_maps(ip.wrap(net()), X, ["0", "2"])
    data = found.png(site="2")
    assert struct.unpack(">II", data[16:24]) == (8 * 4 - 1, 2 * 4 - 1)
    assert struct.unpack(">II", found.png(site="2", zoom=5)[16:24]) == (8 * 16 - 1, 2 * 16 - 1)
    both = found.save(tmp_path / "x.png").read_bytes()
    assert struct.unpack(">II", both[16:24]) == (8 * 8 - 1, (2 * 7 - 1) + 4 + (2 * 4 - 1))
    page = found.save(tmp_path / "x.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert found.html_body() in page
    assert [line.split() for line in repr(found).splitlines()[1:]] == [
        ["site", "channels", "height", "width"],
        ["0", "10", "6", "7"],
        ["2", "10", "3", "3"],
    ]
    assert found.to_dict()["grids"][1]["values"]["tensor"] == found["2"].values.tolist()
    with pytest.raises(ValueError, match=r"^save writes .*; got 'x.gif'.$"):
        found.save("x.gif")
    with pytest.raises(ip.SiteNotFound) as caught:
        found.png(site="1")
    assert str(caught.value) == "no feature maps of '1'. There are: '0', '2'."


def test_values_that_are_no_maps_are_an_error_that_says_what_is_needed():
    model = ip.wrap(net())
    with pytest.raises(ValueError) as caught:
        feature_maps(model, X, "4")
    assert str(caught.value) == (
        "feature maps need values of shape [batch, channel, height, width]; '4' is (3, 2).\n"
        "  name a convolution, a pooling or an activation after one   (list them: model.sites)"
    )
    with pytest.raises(ValueError) as caught:
        feature_maps(model, X, "?")
    assert str(caught.value) == (
        "feature maps need values of shape [batch, channel, height, width]; '3' is (3, 90).\n"
        "  of the sites asked for, these have maps: '0', '1', '2'"
    )


def test_inputs_may_be_arguments_or_keywords():
    class Sum(nn.Module):
        def forward(self, left, right):
            return left + right

    model = ip.wrap(Sum())
    for inputs in ((X, X), {"left": X, "right": X}):
        assert torch.equal(feature_maps(model, inputs, "output")["output"].values, 2 * X[0])
