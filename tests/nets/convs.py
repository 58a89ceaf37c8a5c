"""A conv of every geometry, with the shape of one sample."""

from torch import nn

GEOMETRIES = [
    (nn.Conv1d(6, 8, 5, padding=2), (6, 17)),
    (nn.Conv1d(6, 8, 4, padding="same", dilation=3), (6, 17)),
    (nn.Conv2d(4, 6, 1, bias=False), (4, 5, 7)),
    (nn.Conv2d(4, 6, 1, padding=1), (4, 5, 7)),
    (nn.Conv2d(4, 6, 1, stride=2), (4, 5, 8)),
    (nn.Conv2d(4, 6, 1, stride=(3, 1)), (4, 5, 8)),
    (nn.Conv2d(6, 9, 1, stride=2, groups=3), (6, 6, 7)),
    (nn.Conv2d(6, 9, 1, groups=3), (6, 6, 7)),
    (nn.Conv2d(4, 6, 1, stride=2, padding=1, padding_mode="reflect"), (4, 5, 8)),
    (nn.Conv2d(4, 6, 1, padding=0, padding_mode="circular"), (4, 5, 8)),
    (nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3), (6, 8, 9)),
    (nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 4), (1, 2), padding_mode="circular"), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, padding_mode="reflect"), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=(2, 0), padding_mode="replicate"), (4, 9, 9)),
    (nn.Conv2d(4, 6, (2, 4), padding="same"), (4, 7, 8)),
    (nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"), (4, 7, 8)),
    (nn.Conv2d(4, 6, 3, padding="valid"), (4, 7, 8)),
    (nn.Conv2d(4, 6, 3, stride=3), (4, 8, 7)),
    (nn.Conv3d(4, 6, 3, stride=(1, 2, 1), padding=1, groups=2), (4, 4, 5, 6)),
    (nn.Conv3d(4, 5, 2, padding=(0, 1, 1), padding_mode="replicate"), (4, 4, 5, 6)),
    (nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1, output_padding=1), (6, 7)),
    (nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1, groups=2), (6, 5, 4)),
    (nn.ConvTranspose2d(6, 4, 3, 2, output_padding=2, dilation=3), (6, 5, 4)),
    (nn.ConvTranspose2d(6, 4, 1, groups=2), (6, 5, 4)),
    (nn.ConvTranspose2d(6, 4, 1, stride=2, output_padding=1), (6, 5, 4)),
    (nn.ConvTranspose3d(4, 4, 2, stride=2), (4, 3, 2, 3)),
]
