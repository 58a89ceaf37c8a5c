"""Timelines for the tests of pictures and exports: drawn at random, and recorded from a small net."""

from collections.abc import Sequence

from hypothesis import strategies as st
from small import Residual
from torch import ones

from floorplan.ledger.pillars import PILLARS
from floorplan.ledger.run import Step, run
from floorplan.timeline.blocks import DIRECTIONS, Block, StepTimeline

ROLES = (*PILLARS, "gradient", "output", "temporary")
NAMES = (
    "features_1_conv",
    "",
    "loss",
    "</script><script>alert(1)</script>",
    "a\"b'c&d",
    "x\x1b[31m",
    "\udc80",
    "$x^{2",
    "ü",
)


def first_fit(blocks: Sequence[Block]) -> list[int]:
    """An offset for each block, largest first, at the lowest free place."""
    offsets, done = [0] * len(blocks), list[int]()
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i].nbytes):
        b, at = blocks[i], 0
        taken = [(offsets[j], blocks[j]) for j in done if blocks[j].born < b.died and b.born < blocks[j].died]
        for offset, other in sorted(taken, key=lambda p: p[0]):
            if offset < at + b.nbytes and at < offset + other.nbytes:
                at = offset + other.nbytes
        offsets[i] = at
        done.append(i)
    return offsets


@st.composite
def timelines(draw: st.DrawFn) -> StepTimeline:
    """Any timeline: empty ones, tensors without bytes or without life, hostile names."""
    events = draw(st.integers(0, 30))
    blocks = []
    for _ in range(draw(st.integers(0, 12)) if events else 0):
        born = draw(st.integers(0, events - 1))
        died = draw(st.integers(born, events))
        nbytes = draw(st.sampled_from((0, 1, 4, 64, 70_000, 3_000_000, 2**33)))
        blocks.append(
            Block(
                born,
                died,
                nbytes,
                draw(st.sampled_from(NAMES)),
                draw(st.sampled_from(DIRECTIONS)),
                "aten.add.Tensor",
                (nbytes // 4,),
                "float32",
                draw(st.sampled_from(ROLES)),
            )
        )
    state = draw(st.sampled_from(((), (("model", 10), ("optimizer", 2_000_000)))))
    return StepTimeline(draw(st.sampled_from(NAMES)), tuple(blocks), events, state)


def recorded(batch: int = 4) -> StepTimeline:
    """One real step of a small residual net."""
    seen = run(Step(Residual(), (ones(batch, 3, 12, 12),)), fake=False)
    line, blocks = seen.timeline, []
    forward = max(line.lives[i].born for i in seen.saved_lives)
    for i, life in enumerate(line.lives):
        role = "gradient" if i in seen.grad_lives else "convolution" if i in seen.saved_lives else "temporary"
        died = line.events if life.died is None else life.died
        direction = "forward" if life.born <= forward else "backward"
        blocks.append(
            Block(
                life.born,
                died,
                int(life.nbytes),
                life.node,
                direction,
                life.op,
                tuple(life.shape),
                str(life.dtype).removeprefix("torch."),
                role,
            )
        )
    return StepTimeline("residual", tuple(blocks), line.events, (("model", 5000),))


def step() -> StepTimeline:
    """A step small enough to reckon by hand: peak 9 MB at event 3, in the backward."""
    return StepTimeline(
        "by hand",
        (
            Block(
                0, 5, 3_000_000, "conv1", "forward", "aten.convolution.default", (3, 250_000), "float32", "convolution"
            ),
            Block(1, 2, 1_000_000, "conv1", "forward", "aten.add.Tensor", (250_000,), "float32", "temporary"),
            Block(3, 4, 6_000_000, "conv1", "backward", "aten.mul.Tensor", (1_500_000,), "float32", "temporary"),
            Block(4, 6, 2_000, "conv1", "backward", "aten.mul.Tensor", (500,), "float32", "gradient"),
        ),
        6,
        (("model", 4_000), ("optimizer", 8_000)),
    )
