"""What autograd keeps of the hard models: measured figures, and what a rewrite can do with each.

Each follows a public report (the address above it). PyTorch 2.13, CPU, float32, everything trainable as
built. A pair of bytes: distinct storages, and every tensor once per op that saved it (inputs included).
"""

from collections.abc import Callable
from dataclasses import dataclass

import hard_nets as nets
import torch
import torch.nn.functional as F
from hard_nets import Conv, Lambda, Norm, block, block2, pair, same, swish
from torch import Tensor, nn


@dataclass(frozen=True)
class Hard:
    """One model and what is true of it."""

    build: Callable[[], nn.Module]
    input: tuple[int, ...]
    train: tuple[int, int]  # saved, once per op
    evaluate: tuple[int, int]
    doubled: int  # saved in train mode at twice the batch
    storages: tuple[int, int]  # kept and input storages, train and eval
    floor: str = "yes"  # yes, partial, no
    sites: int | None = None  # bytes of all sites at rank 2
    refused: tuple[str, ...] = ()  # nodes named as left alone


HARD: dict[str, Hard] = {
    # https://github.com/pytorch/pytorch/issues/63027
    "relu-result-read-twice": Hard(
        lambda: Lambda(
            lambda m, x: m.c3(F.relu(m.c2(F.relu(m.c1(x))))), c1=same(3, 16), c2=same(16, 16), c3=same(16, 5)
        ),
        (4, 3, 10, 10),
        (51200, 107200),
        (51200, 107200),
        102400,
        (3, 3),
        "yes",
        11200,
    ),
    # https://github.com/pytorch/pytorch/issues/5687
    "in-place-add-after-relu": Hard(
        lambda: Lambda(nets.added_in_place, c1=same(3, 6), skip=Conv(3, 6, 1), head=Conv(6, 2, 1)),
        (2, 3, 7, 7),
        (2352, 7056),
        (2352, 7056),
        4704,
        (2, 2),
        "no",
        None,
    ),
    # https://github.com/pytorch/pytorch/issues/63644
    "leaky-relu-keeps-its-input": Hard(
        lambda: Lambda(
            lambda m, x: m.act(m.b2(m.c2(m.act(m.b1(m.c1(x)))))).mean((2, 3)), **pair(12), act=nn.LeakyReLU(0.1)
        ),
        (4, 3, 8, 8),
        (61632, 64704),
        (61440, 64512),
        123072,
        (10, 6),
        "yes",
        4864,
    ),
    # https://github.com/facebookresearch/ClassyVision/pull/755
    "handwritten-swish": Hard(
        lambda: Lambda(
            lambda m, x: m.c2(swish(m.b1(m.c1(x)))), c1=same(3, 8, bias=False), b1=Norm(8), c2=Conv(8, 4, 1)
        ),
        (4, 3, 8, 8),
        (32832, 44096),
        (32768, 44032),
        65600,
        (7, 5),
        "partial",
        4096,
    ),
    # https://github.com/pytorch/pytorch/issues/85485
    "max-pool-keeps-its-input": Hard(
        lambda: Lambda(
            lambda m, x: m.c2(m.pool(torch.tanh(m.c1(x)))).mean((2, 3)),
            c1=same(3, 8),
            c2=same(8, 8),
            pool=nn.MaxPool2d(2),
        ),
        (4, 3, 8, 8),
        (14336, 25600),
        (14336, 25600),
        28672,
        (4, 4),
        "partial",
        2560,
    ),
    # https://github.com/pytorch/pytorch/issues/16577
    "channel-dropout": Hard(
        lambda: Lambda(
            lambda m, x: m.c2(m.drop(F.relu(m.c1(x)))), c1=same(3, 8), c2=Conv(8, 4, 1), drop=nn.Dropout2d(0.25)
        ),
        (4, 3, 8, 8),
        (16512, 19584),
        (8192, 19456),
        33024,
        (4, 2),
        "yes",
        4352,
    ),
    # https://github.com/pytorch/pytorch/issues/68190
    "training-flag": Hard(
        lambda: Lambda(
            lambda m, x: m.fc(F.dropout(block(m, x).mean((2, 3)), 0.5, training=m.training)),
            c1=same(3, 8),
            b1=Norm(8),
            fc=nn.Linear(8, 5),
        ),
        (4, 3, 8, 8),
        (16704, 19776),
        (16512, 19584),
        33344,
        (7, 4),
        "yes",
        2304,
    ),
    # https://github.com/TylerYep/torchinfo/issues/144
    "one-conv-in-a-loop": Hard(
        lambda: Lambda(nets.looped, conv=same(8, 8)),
        (2, 8, 6, 6),
        (11520, 23040),
        (11520, 23040),
        23040,
        (6, 6),
        "yes",
        3240,
    ),
    # https://github.com/facebookresearch/maskrcnn-benchmark/issues/267
    "handwritten-frozen-norm": Hard(
        lambda: Lambda(
            lambda m, x: m.c2(F.relu(m.n1(m.c1(x)))), c1=same(3, 8), n1=nets.FrozenNorm(8), c2=Conv(8, 4, 1)
        ),
        (4, 3, 8, 8),
        (8192, 19456),
        (8192, 19456),
        16384,
        (2, 2),
        "yes",
        4352,
    ),
    # https://github.com/pytorch/pytorch/issues/60624
    "norm-without-statistics": Hard(
        lambda: Lambda(
            lambda m, x: m.c2(block(m, x)), c1=same(3, 8), b1=Norm(8, track_running_stats=False), c2=Conv(8, 4, 1)
        ),
        (4, 3, 8, 8),
        (16448, 27712),
        (16448, 27712),
        32832,
        (5, 5),
        "partial",
        4096,
        ("b1",),
    ),
    # https://github.com/DingXiaoH/RepVGG/issues/18
    "conv-bias-before-norm": Hard(
        nets.biased, (4, 3, 8, 8), (16448, 27712), (16384, 27648), 32832, (5, 3), "partial", 2304
    ),
    # https://github.com/facebookresearch/detectron2/pull/3160
    "zero-and-negative-variance": Hard(
        nets.bad_variance, (4, 3, 8, 8), (24672, 33888), (24576, 33792), 49248, (9, 5), "partial", 4288, ("b2",)
    ),
    # https://github.com/pytorch/pytorch/issues/180995
    "grouped-deconv": Hard(nets.deconv, (2, 4, 5, 5), (9648, 10448), (9600, 10400), 19248, (5, 3), "yes", 950),
    # https://github.com/huggingface/peft/pull/2403
    "depthwise": Hard(
        nets.depthwise, (4, 3, 8, 8), (53472, 81120), (53248, 80896), 106720, (12, 6), "partial", 4480, ("dw",)
    ),
    # https://github.com/huggingface/peft/issues/3697
    "dilated-reflect-circular": Hard(
        nets.geometry, (2, 3, 9, 9), (21288, 21288), (21240, 21240), 42528, (7, 5), "yes", 2782
    ),
    # https://github.com/pytorch/pytorch/pull/45667
    "same-padding-even-kernel": Hard(
        lambda: Lambda(
            lambda m, x: m.c3(m.c2(m.c1(x))),
            c1=nn.Conv1d(3, 8, 1),
            c2=nn.Conv1d(8, 8, 4, padding="same"),
            c3=nn.Conv1d(8, 4, 2, padding="same", dilation=3),
        ),
        (2, 3, 8),
        (1152, 1344),
        (1152, 1344),
        2304,
        (3, 3),
        "yes",
        384,
    ),
    # https://github.com/microsoft/LoRA/issues/115
    "one-dimensional": Hard(
        nets.sensors, (4, 9, 128), (147840, 215424), (147456, 215040), 295296, (11, 7), "partial", 7680
    ),
    # https://github.com/STRCWearlab/DeepConvLSTM_py3/issues/7
    "conv-lstm": Hard(
        lambda: Lambda(
            nets.conv_lstm,
            c1=Conv(1, 8, (5, 1)),
            c2=Conv(8, 8, (5, 1)),
            lstm=nn.LSTM(72, 16, num_layers=2, batch_first=True),
            fc=nn.Linear(16, 6),
        ),
        (3, 24, 9),
        (241024, 264160),
        (241024, 264160),
        482048,
        (14, 14),
        "partial",
        10476,
        ("lstm",),
    ),
    # https://github.com/gpleiss/efficient_densenet_pytorch/issues/66
    "dense-concatenation": Hard(
        nets.Dense, (2, 8, 6, 6), (32704, 48832), (32256, 48384), 64960, (16, 8), "partial", 2304
    ),
    # https://github.com/huggingface/trl/pull/4247
    "channel-split-and-shuffle": Hard(
        lambda: Lambda(nets.channel_shuffle, c0=Conv(3, 8, 1), c1=same(4, 4), c2=Conv(2, 4, 1)),
        (2, 3, 6, 6),
        (5760, 3744),
        (5760, 3744),
        11520,
        (4, 4),
        "yes",
        1764,
    ),
    # https://github.com/pytorch/pytorch/issues/62395
    "branch-on-values": Hard(
        lambda: Lambda(nets.value_branch, c1=same(3, 6), c2=same(6, 6)),
        (2, 3, 6, 6),
        (3456, 6048),
        (3456, 6048),
        6912,
        (3, 3),
        "no",
        None,
    ),
    # https://github.com/SonySemiconductorSolutions/mct-model-optimization/issues/1299
    "branch-on-sizes": Hard(
        lambda: Lambda(nets.size_branch, hi=same(3, 6), lo=Conv(3, 6, 3, stride=2, padding=1), head=Conv(6, 2, 1)),
        (2, 3, 7, 7),
        (5472, 7824),
        (5472, 7824),
        10944,
        (4, 4),
        "yes",
        2450,
    ),
    # https://github.com/pytorch/pytorch/issues/161807
    "ordered-dict-output": Hard(
        lambda: Lambda(
            nets.two_heads, c1=same(3, 6, bias=False), b1=Norm(6), c2=same(6, 6), head=Conv(6, 2, 1), aux=Conv(6, 2, 1)
        ),
        (2, 3, 8, 8),
        (9264, 20016),
        (9216, 19968),
        18480,
        (6, 4),
        "yes",
        4288,
    ),
    # https://github.com/pytorch/pytorch/issues/3805
    "data-parallel-checkpoint": Hard(
        lambda: Lambda(block, c1=same(3, 6, bias=False), b1=Norm(6)),
        (2, 3, 6, 6),
        (3504, 4368),
        (3456, 4320),
        6960,
        (5, 3),
        "yes",
        630,
    ),
    # https://github.com/pytorch/pytorch/issues/61464
    "torchscript-archive": Hard(
        lambda: Lambda(block, c1=same(3, 6, bias=False), b1=Norm(6)),
        (2, 3, 6, 6),
        (3504, 4368),
        (3456, 4320),
        6960,
        (5, 3),
        "yes",
        630,
    ),
    # https://github.com/ecmwf/anemoi-core/issues/1416
    "hostile-checkpoint": Hard(
        lambda: Lambda(lambda m, x: F.relu(m.c1(x)), c1=Conv(3, 4, 1)),
        (2, 3, 6, 6),
        (1152, 2016),
        (1152, 2016),
        2304,
        (2, 2),
        "yes",
        612,
    ),
    # https://github.com/pytorch/pytorch/issues/49643
    "spectral-norm": Hard(
        nets.spectral, (2, 3, 7, 7), (6244, 9772), (6244, 9772), 10948, (7, 7), "partial", 858, ("c2",)
    ),
    # https://github.com/sksq96/pytorch-summary/issues/66
    "group-and-instance-norm": Hard(
        lambda: Lambda(
            lambda m, x: block2(m, x).mean((2, 3)),
            **pair(8) | {"b1": nn.GroupNorm(2, 8), "b2": nn.InstanceNorm2d(8, affine=True)},
        ),
        (4, 3, 8, 8),
        (33216, 44480),
        (33216, 44480),
        66432,
        (10, 10),
        "partial",
        4096,
        ("b1", "b2"),
    ),
    # https://github.com/pytorch/pytorch/issues/48049
    "autocast": Hard(
        lambda: Lambda(lambda m, x: block2(m, x).mean((2, 3)), **pair(16)),
        (4, 3, 8, 8),
        (65792, 85248),
        (65536, 84992),
        131328,
        (9, 5),
        "yes",
        5120,
    ),
    # https://github.com/pytorch/pytorch/issues/121651
    "channels-last": Hard(
        lambda: Lambda(block2, **pair(8)), (4, 3, 8, 8), (32896, 44160), (32768, 44032), 65664, (9, 5), "yes", 4608
    ),
    # https://github.com/pytorch/pytorch/issues/109876
    "adaptive-pool": Hard(
        lambda: Lambda(lambda m, x: F.adaptive_avg_pool2d(m.b1(m.c1(x)), 2), c1=same(3, 8, bias=False), b1=Norm(8)),
        (4, 3, 8, 8),
        (16448, 19520),
        (16384, 19456),
        32832,
        (5, 3),
        "partial",
        2048,
    ),
    # https://github.com/pytorch/pytorch/issues/53005
    "projected-residual": Hard(nets.project, (2, 8, 8, 8), (10752, 20992), (10368, 20608), 21120, (13, 7), "yes", 2368),
    # https://github.com/pytorch/pytorch/issues/96136
    "checkpointed": Hard(nets.checkpointed, (2, 3, 8, 8), (4096, 9728), (4096, 9728), 8192, (2, 2), "no", None),
}


def build(name: str, batch: int = 1) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A fresh model and its input, with `batch` times the batch of the figures."""
    torch.manual_seed(0)
    hard = HARD[name]
    model = hard.build()
    x = torch.randn(hard.input[0] * batch, *hard.input[1:])
    if name == "channels-last":
        last = torch.channels_last
        return model.to(memory_format=last), (x.to(memory_format=last),)  # type: ignore[call-overload]
    return model, (x,)
