"""How a training step runs: micro-batches, depth-first stages, forms of the sites. Plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


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
    branches: tuple[str, ...] | None = None  # sites that run as two branches; None: by what each costs (step_forms)
    stream: int = 0  # hidden channels at a time in inverted residuals; 0: whole maps
    reuse: tuple[str, ...] = ()  # sites whose input gradient takes the output gradient's buffer

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for plan.json."""
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> "Schedule":
        """The inverse of `as_dict`."""
        known = {k: data[k] for k in Schedule.__dataclass_fields__ if k in data}
        for name in ("branches", "reuse"):
            if known.get(name) is not None:
                known[name] = tuple(known[name])
        known["stages"] = tuple((str(n), int(m)) for n, m in known.get("stages", ()))
        return Schedule(**known)

    def __str__(self) -> str:
        sizes = [*(str(m or "all") for _, m in self.stages), str(self.last or "all")]
        parts = [f"micro-batch {self.micro_batch}" if self.micro_batch else "whole batch"]
        parts += [f"stages {'|'.join(sizes)} cut at {', '.join(n for n, _ in self.stages)}"] if self.stages else []
        parts += [f"streamed by {self.stream} channels"] if self.stream else []
        return ", ".join(parts)


WHOLE = Schedule()
