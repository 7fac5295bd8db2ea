import torch
from torch import nn

import interpose as ip
from interpose.monitors.shape_log import ShapeLog, ShapeRow


def test_it_lists_every_value_in_execution_order():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 2)
            self.cell = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.cell(self.cell(x)))

    log = ShapeLog()
    ip.wrap(Twice().double()).run_with_hooks(torch.randn(3, 4).double(), hooks=[log])
    found = [(row.site, row.call, row.shape) for row in log.rows]
    assert found == [
        ("cell", 0, (3, 4)),
        ("cell", 1, (3, 4)),
        ("last", 0, (3, 2)),
        ("output", 0, (3, 2)),
    ]
    assert log.rows[0] == ShapeRow(site="cell", call=0, shape=(3, 4), dtype="float64", device="cpu")


def test_it_names_every_tensor_of_a_container():
    log = ShapeLog("output.output")
    model = ip.wrap(nn.ModuleDict({"output": nn.LSTM(3, 5, batch_first=True)}))
    with model.hooks([ShapeLog("**"), log := ShapeLog("**")]):
        model.module["output"](torch.randn(2, 4, 3))
    assert [row.shape for row in log.rows] == [(2, 4, 5), (1, 2, 5), (1, 2, 5)]
    assert len({row.site for row in log.rows}) == 3


def test_it_prints_as_a_table_and_begins_anew_when_cleared(tmp_path):
    log = ShapeLog("0")
    ip.wrap(nn.Sequential(nn.Linear(2, 3))).run_with_hooks(torch.ones(1, 2), hooks=[log])
    assert repr(log) == (
        "Shape log of 1 values\n"
        "site  call  shape   dtype    device\n"
        "0     0     (1, 3)  float32  cpu"
    )
    assert "(1, 3)" in log._repr_html_()
    assert "(1, 3)" in log.save(tmp_path / "x.html").read_text()
    assert log.to_dict()["rows"][0]["shape"] == [1, 3]
    log.clear()
    assert log.rows == []
