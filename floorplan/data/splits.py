"""Which recordings are the source and which the target, and the proof that no row is on two sides.

recordings -> (source, target) -> each first 80 % / last 20 % of time -> windows -> scaled by the source
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from floorplan.data.windows import Part, Recording, Rule, Scale, Windows, cut, fit_scale, time_split
from floorplan.errors import FloorplanError

Sides = tuple[list[Recording], list[Recording]]


@dataclass(frozen=True, eq=False)
class Shift:
    """Windows to train the source model, to score it at home, to adapt it and to score the result."""

    source: Windows
    source_test: Windows
    adapt: Windows
    test: Windows
    scale: Scale


def leave_subject_out(recordings: Sequence[Recording], subject: int) -> Sides:
    """(every other subject, this subject)."""
    return _sides(recordings, lambda r: r.subject == subject, f"subject {subject}")


def leave_place_out(recordings: Sequence[Recording], place: str) -> Sides:
    """(every other place on the body, this place)."""
    return _sides(recordings, lambda r: r.place == place, f"place {place!r}")


def placement_split(recordings: Sequence[Recording], source: str = "ideal", target: str = "self") -> Sides:
    """(recordings placed `source`, recordings placed `target`); "mutual" is mutual4, mutual5, ..."""

    def placed(r: Recording, place: str) -> bool:
        return r.place == place or (place == "mutual" and r.place.startswith("mutual"))

    either = [r for r in recordings if placed(r, source) or placed(r, target)]
    return _sides(either, lambda r: placed(r, target), f"placements {source!r} and {target!r}")


def _sides(recordings: Sequence[Recording], is_target: Callable[[Recording], bool], what: str) -> Sides:
    source = [r for r in recordings if not is_target(r)]
    target = [r for r in recordings if is_target(r)]
    if not source or not target:
        counts = f"{len(source)} source and {len(target)} target recordings"
        raise FloorplanError(f"split by {what}: {counts}; both sides need some, load more or choose another target")
    return source, target


def make_shift(
    source: Sequence[Part],
    target: Sequence[Part],
    size: int,
    stride: int,
    *,
    test_stride: int | None = None,
    share: float = 0.8,
    rule: Rule = "majority",
) -> Shift:
    """Both sides split in time and cut; scaled by the statistics of the source's training rows."""
    train, home = time_split(source, share, size)
    adapt, test = time_split(target, share, size)
    scale = fit_scale(train)
    hops = (stride, test_stride or stride, stride, test_stride or stride)
    cuts = [cut(parts, size, hop, rule) for parts, hop in zip((train, home, adapt, test), hops, strict=True)]
    require_disjoint(*cuts)
    at_home, at_home_test, to_adapt, to_test = (w.scaled(scale) for w in cuts)
    return Shift(at_home, at_home_test, to_adapt, to_test, scale)


def require_disjoint(*sides: Windows) -> None:
    """FloorplanError unless no two sides share a row of a recording, hence no window either."""
    spans = sorted(
        (str(record), int(start), int(start) + w.x.shape[2], side)
        for side, w in enumerate(sides)
        for record, start in zip(w.record, w.start, strict=True)
    )
    current, ends = "", dict[int, int]()
    for record, start, stop, side in spans:
        if record != current:
            current, ends = record, {}
        for other, end in ends.items():
            if other != side and start < end:
                twice = f"row {start} of {record} is on sides {other} and {side}"
                raise FloorplanError(f"split: {twice}; split the recording before it is cut")
        ends[side] = max(ends.get(side, 0), stop)
