"""How a training step runs: micro-batches, depth-first stages, forms of the sites. Plain data, as in plan.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from floorplan.errors import FloorplanError


@dataclass(frozen=True)
class Schedule:
    """How a step runs: part sizes are in samples, 0 for all at once.

    stages: (node, size) pairs: the part up to and with `node` runs in parts of `size` samples, what crosses
    behind it is kept whole; the last part's size is `last`.
    """

    micro_batch: int = 0
    stages: tuple[tuple[str, int], ...] = ()
    last: int = 0
    layout: str = "auto"
    branches: tuple[str, ...] | None = None  # sites that run as two branches; None: by what each costs (`program`)
    stream: int = 0  # hidden channels at a time in inverted residuals; 0: whole maps
    reuse: tuple[str, ...] = ()  # sites whose input gradient takes the output gradient's buffer

    @property
    def parts(self) -> bool:
        """Whether the batch is taken apart."""
        return bool(self.micro_batch or self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for plan.json."""
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> "Schedule":
        """The inverse of `as_dict`; FloorplanError for what is no schedule."""
        try:
            return Schedule(**{k: data[k] for k in Schedule.__dataclass_fields__ if k in data})
        except (TypeError, ValueError) as e:
            raise FloorplanError(f"schedule: {e}; write one with `floorplan plan --json`") from e

    def __post_init__(self) -> None:
        """Sequences become tuples; FloorplanError for sizes that are no numbers of samples."""
        try:
            object.__setattr__(self, "stages", tuple((str(n), m) for n, m in self.stages))
            for name in ("branches", "reuse"):
                if (value := getattr(self, name)) is not None:
                    object.__setattr__(self, name, tuple(map(str, value)))
        except (TypeError, ValueError) as e:
            raise FloorplanError(f"schedule: {e}; stages are (node, size) pairs, branches and reuse node names") from e
        if not isinstance(self.layout, str):
            raise FloorplanError(f"schedule: layout {self.layout!r}: give auto, contiguous or channels_last")
        for n in (self.micro_batch, self.last, self.stream, *(m for _, m in self.stages)):
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise FloorplanError(f"schedule: {n} is no size; give a whole number of samples, 0 for all at once")

    def __str__(self) -> str:
        sizes = [*(str(m or "all") for _, m in self.stages), str(self.last or "all")]
        parts = [f"micro-batch {self.micro_batch}" if self.micro_batch else "whole batch"]
        parts += [f"stages {'|'.join(sizes)} cut at {', '.join(n for n, _ in self.stages)}"] if self.stages else []
        parts += [f"streamed by {self.stream} channels"] if self.stream else []
        return ", ".join(parts)


WHOLE = Schedule()


SCHEMA = "floorplan.plan/1"


def read_plan(plan: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A plan.json, or its document: checked, with a choice in it."""
    if isinstance(plan, str | Path):
        try:
            document = json.loads(Path(plan).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise FloorplanError(f"{plan}: no readable plan ({e}); write one with `floorplan plan --json`") from e
    else:
        document = dict(plan)
    where = str(plan) if isinstance(plan, str | Path) else "plan"
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise FloorplanError(f"{where}: no {SCHEMA} document; write one with `floorplan plan --json`")
    if not isinstance(document.get("choice"), dict):
        raise FloorplanError(f"{where}: nothing fitted its budget, so it has no schedule; plan again with a larger one")
    return document


def schedule_in(plan: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The schedule that a plan.json chose, as plain data."""
    found = read_plan(plan)["choice"].get("plan")
    if not isinstance(found, dict):
        raise FloorplanError("plan: its choice has no schedule; write one with `floorplan plan --json`")
    Schedule.of(found)  # or it says what is wrong
    return found


def options_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """The method's name and its options as a plan.json has them."""
    o = document.get("options")
    kinds = {"method": str, "rank": int, "sites": str, "seed": int, "train_head": bool}
    if not isinstance(o, dict) or any(not isinstance(o.get(k), t) for k, t in kinds.items()):
        raise FloorplanError(f"plan: its options lack one of {', '.join(kinds)}; write it with `floorplan plan --json`")
    return {k: o[k] for k in kinds}
