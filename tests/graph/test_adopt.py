"""Functional layers become modules that hold the model's own tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from canonical_nets import Net, canonical
from torch import Tensor, nn

from floorplan.layers.plain import AnyBatchNorm


def test_functional_layers_hold_the_models_own_tensors() -> None:
    torch.manual_seed(0)
    w = nn.ParameterDict(
        {
            "c": torch.randn(6, 2, 3, 3),
            "b": torch.randn(6),
            "t": torch.randn(6, 2, 2, 2),
            "l": torch.randn(5, 8),
            "p": torch.tensor([0.3]),
        }
    )

    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, s.w["c"], s.w["b"], stride=2, padding=1, groups=2)
        y = F.conv_transpose2d(y, s.w["t"], stride=2, groups=2)
        return F.linear(F.prelu(y, s.w["p"]), s.w["l"])

    text, log, gm = canonical(Net(forward, w=w))
    assert text == (
        "conv2d = Conv2d(4, 6, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), groups=2)"
        " <- x\n"
        "conv_transpose2d = ConvTranspose2d(6, 4, kernel_size=(2, 2), stride=(2, 2), groups=2,"
        " bias=False) <- conv2d\n"
        "prelu = PReLU(num_parameters=1) <- conv_transpose2d\n"
        "linear = Linear(in_features=8, out_features=5, bias=False) <- prelu"
    )
    assert not any(log.values()) and len(list(gm.parameters())) == 5
    assert sorted(gm.state_dict())[:2] == ["conv2d.bias", "conv2d.weight"]


class Same(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


class Act(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2, self.eps)
        return F.relu(y)


def test_subclassed_layers_keep_their_place_and_keys() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Same(4, 4, 2), Act(4))
    text, log, gm = canonical(model)
    lines = [line for line in text.splitlines() if not line.startswith("batch_norm = BatchNorm2d(4")]
    assert len(lines) == 3 and "\n".join(lines) == (
        "pad = pad <- input_1, pad=(0, 1, 0, 1), mode=constant, value=None\n"
        "conv2d = Conv2d(4, 4, kernel_size=(2, 2), stride=(1, 1)) <- pad\n"
        "relu = ReLU() <- batch_norm"
    )
    assert not any(log.values()) and set(gm.state_dict()) == set(model.state_dict())
    assert isinstance(gm.get_submodule("1"), nn.BatchNorm2d)


def test_fixed_batch_norm_stays_fixed() -> None:
    class Frozen(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)

    _, log, gm = canonical(nn.Sequential(Frozen(4)))
    norm = gm.get_submodule("0")
    assert isinstance(norm, AnyBatchNorm) and not norm.train().training and norm.fixed
    assert AnyBatchNorm(**norm.config()).config() == norm.config()
    assert list(log.values()) == [""]


def test_one_functional_weight_called_twice_is_one_module() -> None:
    w = nn.ParameterDict({"c": torch.randn(4, 4, 1, 1)})
    model = Net(lambda s, x: F.conv2d(F.conv2d(x, s.w["c"]), s.w["c"]), w=w)
    _, _, gm = canonical(model)
    calls = [n.target for n in gm.graph.nodes if n.op == "call_module"]
    assert calls == ["conv2d", "conv2d"] and list(gm.state_dict()) == ["conv2d.weight"]
