"""What every layer of ours says about itself, so that nobody has to ask for its class.

passes, proof, counts, files and merging  ->  Layer, Adapter  ->  its own answer, or a default
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from floorplan.layers.geometry import Geometry
from floorplan.layers.macs import Macs


@dataclass(frozen=True)
class PlainConv:
    """act(conv(x, weight) + bias [+ skip]): the layer as torch's own conv."""

    geo: Geometry
    weight: Tensor
    bias: Tensor | None
    act: nn.Module | None = None


@dataclass(frozen=True)
class PlainNorm:
    """act(F.batch_norm(x, mean, var, weight, bias, eps=eps)): a fixed scale and shift a channel."""

    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    act: nn.Module | None = None


@dataclass(frozen=True)
class PlainCall:
    """function(x, *args)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


Plain = PlainConv | PlainNorm | PlainCall | nn.Module


class Layer(nn.Module):
    """A layer that a graph calls as a whole and a file may hold.

    It writes into no input but by a flag `inplace`; a second call on the same values is the first again, random
    numbers apart.
    """

    stored: ClassVar[str] = ""  # the name under which files hold a class of ours, wherever it moves
    pillar: ClassVar[str] = "other"  # of what it keeps
    lossy: ClassVar[bool] = False  # its gradient is approximate
    fresh: ClassVar[bool] = False  # its result is a new tensor in every mode
    unmergeable: str = ""  # why it has no plain form although it needs one, read as `which …`

    def config(self) -> dict[str, Any]:
        """Constructor arguments as plain data: unless a layer says otherwise, the attributes of their names.

        `geometry` is that of `geo`; of a tensor, its shape, or for a flag (a bool), whether there is one.
        """
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: self._argument(p) for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    def _argument(self, p: inspect.Parameter) -> Any:
        value = getattr(self, "geo" if p.name == "geometry" else p.name)
        if p.annotation is bool and not isinstance(value, bool):
            return value is not None
        if isinstance(value, Geometry):
            return value.config()
        return list(value.shape) if isinstance(value, Tensor) else value

    @property
    def packed_bits(self) -> float:
        """Bits an element of what it keeps packed."""
        return 1.0

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs | None:
        """What one call multiplies, a sample, from the shapes of its input and result; None: nothing."""
        return None

    def plain_form(self) -> Plain | None:
        """What computes the same in torch's own layers; None for a layer that stays as it is."""
        return None


class Adapter(Layer):
    """A frozen layer with trained factors of rank `rank` (0: none); what is not a parameter is frozen.

    `starts_at_zero` names the factors at whose zeros the layer computes what it replaced.
    """

    rank: int
    geo: Geometry | None = None
    in_channels: int = 0
    pillar = "adapter"
    unmergeable = "has no place in a plain layer's weight"  # until it says of a plain form
    starts_at_zero: ClassVar[tuple[str, ...]] = ("U",)
    merges_a_step: ClassVar[int] = 0  # times that a step multiplies out the factors, as the paper counts
    beside: ClassVar[bool] = False  # its result is added to a conv's, into whose weight it merges
    replays: ClassVar[bool] = False  # a replay gives the gradient of its P: it has `captures` and `gq`

    def __init__(self) -> None:
        super().__init__()
        self.plain = False  # plain autograd on the same formula: the reference of every check

    def axes(self) -> dict[str, str]:
        """Tensor -> a letter an axis: r of the rank, C of a width, . a number; not named: "CC"."""
        return {}

    def delta(self) -> Tensor:
        """What the factors add to the weight, differentiable."""
        raise NotImplementedError(f"{type(self).__name__} does not say its delta()")

    def source_delta(self) -> Tensor:
        """What they add to the weight of the source's conv, before a BatchNorm was folded into it."""
        return self.delta()

    def bottleneck(self, x: Tensor) -> Tensor | None:
        """q of an input; None for a layer without a frozen projection of it."""
        return None


def model_state(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]
