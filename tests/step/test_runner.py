"""How stages run: the order of parts, what is put together, whose buffers are used."""

import torch
from torch import Tensor, nn

from floorplan.step.region import Region
from floorplan.step.runner import Runner, Stage, _Assembled, _parts, sliced


def linear_stages(log: list[str]) -> list[Stage]:
    """Two stages that double their argument; the second's argument needs a gradient."""

    def forward(name: str):  # type: ignore[no-untyped-def]
        def run(box: list[Tensor]) -> tuple[Tensor, ...]:
            (x,) = box
            box.clear()
            log.append(f"{name} forward {x.shape[0]}")
            return (2 * x, torch.tensor(x.shape[0]))

        return run

    def backward(name: str):  # type: ignore[no-untyped-def]
        def run(box: list[Tensor]) -> tuple[Tensor, ...]:
            g, kept = box
            assert kept == g.shape[0]
            log.append(f"{name} backward {g.shape[0]}")
            return (2 * g,)

        return run

    return [Stage(forward(n), backward(n), 1, True, True) for n in ("a", "b")]


def test_depth_first_in_reverse() -> None:
    log: list[str] = []
    anchor = nn.Parameter(torch.ones(1))
    head = Region(lambda m, x: x * anchor, nn.Identity(), (True,), lambda: anchor)
    runner = Runner(linear_stages(log), head, [2, 3], 4, lambda out, t: (out * t).sum(), False)
    x, t = torch.arange(5.0), torch.ones(5)
    assert float(runner.step((x,), t)) == 40.0 and float(anchor.grad) == 40.0
    assert log == [
        "a forward 2",
        "a forward 2",
        "b forward 3",
        "b backward 3",
        "b forward 1",
        "b backward 1",
        "a backward 2",
        "a backward 2",
        "a forward 1",
        "b forward 1",
        "b backward 1",
        "a backward 1",
    ]


def test_parts() -> None:
    assert [(p.start, p.stop) for p in _parts(5, 2)] == [(0, 2), (2, 4), (4, 5)]
    assert _parts(5, 0) == _parts(5, 9) == [slice(0, 5)]
    x = torch.arange(4)
    assert sliced({"a": [x, 3, torch.ones(2)]}, slice(0, 2), 4)["a"][0].tolist() == [0, 1]
    assert sliced(x, slice(0, 4), 4) is x


def test_assembled_keeps_the_layout_or_takes_the_given_buffer() -> None:
    part = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    a = _Assembled(4)
    for p in (slice(2, 4), slice(0, 2)):
        a.put(p, (part,))
    (whole,) = a.box()
    assert whole.is_contiguous(memory_format=torch.channels_last) and torch.equal(whole[2:], part)
    mine = torch.zeros(4, 3, 4, 5)
    b = _Assembled(4, [mine])
    b.put(slice(0, 2), (part,))
    assert b.box()[0] is mine and torch.equal(mine[:2], part)
