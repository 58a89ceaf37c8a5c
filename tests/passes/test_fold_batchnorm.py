"""fold_batchnorm: one golden graph for what it does, one for each reason it does not."""

from typing import Any, cast

import pytest
import torch
from graphs import randomize, run_passes, show
from torch import Tensor, nn

from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.passes.fold_batchnorm import PASS

X = torch.randn(2, 3, 6, 5)


class Net(nn.Module):
    """conv, another conv and two norms, wired as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.bn2 = nn.BatchNorm2d(3)
        randomize(self)


class TwoReaders(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) + y  # type: ignore[no-any-return]


class SharedTwoNorms(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv(self.bn(self.conv(x))))  # type: ignore[no-any-return]


class SharedOneNorm(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.bn(self.conv(x))))  # type: ignore[no-any-return]


class NormServesBoth(Net):
    """One BatchNorm, behind a conv and on its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.bn(self.conv(input=x)))  # type: ignore[no-any-return]


class OutputReads(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x)
        return y, self.bn(input=y)


class Sized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.up(x, output_size=[13, 10]))  # type: ignore[no-any-return]


def golden(model: nn.Module, want: str, x: Tensor = X) -> None:
    randomize(model)
    gm, log = run_passes(model, [PASS], x)
    assert show(gm, log) == want


def test_folds_behind_a_conv() -> None:
    golden(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        "input_1 = input()\n_0 = FusedConv(input_1)\n_2 = ReLU(_0)\noutput = output(_2)",
    )


@pytest.mark.parametrize(
    "conv,bn,shape",
    [
        (nn.Conv1d(3, 4, 3, bias=False), nn.BatchNorm1d(4, affine=False), (2, 3, 9)),
        (nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
        (nn.Conv2d(3, 4, 2), nn.SyncBatchNorm(4), (2, 3, 4, 4)),
        (nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d(6), (2, 4, 4, 4)),
    ],
    ids=["1d", "3d", "sync", "transposed"],
)
def test_folds_every_kind(conv: nn.Module, bn: nn.Module, shape: tuple[int, ...]) -> None:
    want = "input_1 = input()\n_0 = FusedConv(input_1)\noutput = output(_0)"
    golden(nn.Sequential(conv, bn), want, torch.randn(shape))


def test_norm_before_the_conv_becomes_an_affine() -> None:
    golden(
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)),
        "input_1 = input()\n_0 = ChannelAffine(input_1)\n_1 = Conv2d(_0)\noutput = output(_1)\n"
        "# _0: channel affine: no conv directly before it",
    )


def test_norm_behind_an_activation_becomes_an_affine() -> None:
    golden(
        nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)),
        "input_1 = input()\n_0 = ReLU(input_1)\n_1 = ChannelAffine(_0)\noutput = output(_1)\n"
        "# _1: channel affine: a ReLU stands before it, not a conv",
    )


def test_conv_with_two_readers() -> None:
    golden(
        TwoReaders(),
        "x = x()\nconv = Conv2d(x)\nbn = ChannelAffine(conv)\nadd = add(bn, conv)\n"
        "output = output(add)\n# bn: channel affine: conv has other readers",
    )


def test_conv_read_by_the_output() -> None:
    golden(
        OutputReads(),
        "x = x()\nconv = Conv2d(x)\nbn = ChannelAffine(conv)\noutput = output((conv, bn))\n"
        "# bn: channel affine: conv has other readers",
    )


def test_shared_conv_with_two_norms() -> None:
    golden(
        SharedTwoNorms(),
        "x = x()\nconv = Conv2d(x)\nbn = ChannelAffine(conv)\nconv_1 = Conv2d(bn)\n"
        "bn2 = ChannelAffine(conv_1)\noutput = output(bn2)\n"
        "# bn: channel affine: conv has other readers\n"
        "# bn2: channel affine: conv has other readers",
    )


def test_shared_conv_with_one_norm_folds_once() -> None:
    golden(SharedOneNorm(), "x = x()\nconv = FusedConv(x)\nconv_1 = FusedConv(conv)\noutput = output(conv_1)")


def test_norm_behind_a_conv_and_on_its_own() -> None:
    golden(
        NormServesBoth(),
        "x = x()\nconv = FusedConv(x)\nbn_1 = ChannelAffine(conv)\noutput = output(bn_1)\n"
        "# bn_1: channel affine: a BatchNorm2d stands before it, not a conv",
    )


def test_conv_called_with_an_output_size() -> None:
    golden(
        Sized(),
        "x = x()\nup = ConvTranspose2d(x, output_size=[13, 10])\nbn = ChannelAffine(up)\n"
        "output = output(bn)\n"
        "# bn: channel affine: up: it is called with output_size, which a site does not take",
    )


@pytest.mark.parametrize(
    "variance,reason",
    [
        (float("nan"), "running_var is not finite at channel 1"),
        (-1.0, "running_var + eps <= 0 at channel 1"),
        (-1e-5, "running_var + eps <= 0 at channel 1"),
    ],
)
def test_broken_statistics_are_refused(variance: float, reason: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), randomize(nn.BatchNorm2d(4)))
    cast(Any, model[1]).running_var[1] = variance
    gm, log = run_passes(model, [PASS], X)
    assert show(gm, log) == (
        f"input_1 = input()\n_0 = Conv2d(input_1)\n_1 = BatchNorm2d(_0)\noutput = output(_1)\n# _1: {reason}"
    )


def test_no_running_statistics_is_refused() -> None:
    golden(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        "input_1 = input()\n_0 = Conv2d(input_1)\n_1 = BatchNorm2d(_0)\noutput = output(_1)\n"
        "# _1: no running statistics: it normalises by the batch in eval mode too",
    )


def test_zero_variance_is_folded_with_a_word() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    cast(Any, model[1]).running_var[1] = 0.0
    gm, log = run_passes(model, [PASS], X)
    assert show(gm, log) == (
        "input_1 = input()\n_0 = FusedConv(input_1)\noutput = output(_0)\n# _1: channel 1 is scaled by 316"
    )


def test_train_mode_never_unfreezes_a_folded_norm() -> None:
    torch.manual_seed(0)
    model = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)))
    gm, _ = run_passes(model, [PASS], X)
    x = X.double()
    want = model.double().eval()(x)
    torch.testing.assert_close(gm.train()(x), want)
    torch.testing.assert_close(gm.train()(x), want)
    kinds = [type(m) for m in gm.modules()][1:]
    assert kinds == [FusedConv, ChannelAffine] and not list(gm.parameters())
