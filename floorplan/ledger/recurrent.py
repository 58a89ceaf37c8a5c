"""nn.LSTM on the CPU as it really runs: one oneDNN op a layer and direction, with a workspace.

Fake tensors would take the unfused path, which keeps other tensors. The workspace is oneDNN's own format:
its size is asked of the real op, at the same sizes, on zeros.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from floorplan.torch_doors import FakeTensor, no_modes, other_lstm

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_LSTM_MODE = 2


def fused_lstm() -> AbstractContextManager[None]:
    """Let nn.LSTM take the path of real CPU tensors."""
    return other_lstm(_lstm)


def _lstm(plain: Callable[..., Any], x: Tensor, hx: Any, *rest: Any) -> Any:
    packed = isinstance(hx, Tensor)
    return plain(x, hx, *rest) if packed or not _runs_fused([x, *hx, *rest[0]]) else _layers(x, hx, *rest)


def _runs_fused(tensors: Sequence[Tensor]) -> bool:
    same = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    on = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # type: ignore[no-untyped-call]
    plain = not torch.is_autocast_enabled("cpu") and tensors[1].shape[2] == tensors[2].shape[2]
    return bool(on and same and plain and isinstance(tensors[0], FakeTensor))


def _layers(
    x: Tensor,
    hx: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every layer and direction by its fused op; what stands between them is torch's own."""
    directions, each = 2 if bidirectional else 1, 4 if biases else 2
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    h0, c0 = hx[0].contiguous(), hx[1].contiguous()
    hidden, ends = int(h0.shape[2]), []
    for layer in range(layers):
        outs = []
        for d in range(directions):
            i = layer * directions + d
            w = list(weights[each * i : each * (i + 1)])
            w += [] if biases else [torch.zeros_like(w[0]), torch.zeros_like(w[1])]
            y, h, c, _ = LAYER(
                x, *w, h0[i], c0[i], d > 0, [], _LSTM_MODE, hidden, layers, biases, bidirectional, batch_first, train
            )
            outs.append(y)
            ends.append((h, c))
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train)
    hy, cy = (torch.stack(t) for t in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x), hy, cy


def two_bias_gradients(args: Sequence[Any], out: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a fake LAYER_BACKWARD call: the real one makes both bias gradients."""
    return (*out[:4], torch.empty_like(out[4]), *out[5:])


def with_workspace(args: Sequence[Any], out: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a fake LAYER call with a workspace of the real one's size."""
    shapes = tuple(tuple(n if isinstance(n, int) else int(n.node.hint) for n in t.shape) for t in args[:7])
    size = _workspace(shapes, tuple(tuple(v) if isinstance(v, list) else v for v in args[7:]))
    return (*out[:3], out[0].new_empty(size, dtype=torch.uint8))


@lru_cache(maxsize=64)
def _workspace(shapes: tuple[tuple[int, ...], ...], options: tuple[Any, ...]) -> int:
    with no_modes():
        found = LAYER(*(torch.zeros(s) for s in shapes), *(list(o) if isinstance(o, tuple) else o for o in options))
    return 0 if found[3] is None else int(found[3].numel())
