"""The fit finds a machine that made the samples, shrugs off odd ones, and states the error it makes."""

import random

import pytest

from floorplan.cost_models.roofline import Machine, Sample, fit
from floorplan.errors import FloorplanError

TRUE = Machine(5e10, 8e9, 2e-5)


def samples(n: int = 40, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    found: list[Sample] = []
    for _ in range(n):
        flops, moved, calls = 10 ** rng.uniform(4, 10), 10 ** rng.uniform(3, 8), rng.randint(1, 4)
        found.append((flops, moved, calls, TRUE.op_time(flops, moved, calls) * (1 + noise * rng.uniform(-1, 1))))
    return found


def test_times_by_hand() -> None:
    m = Machine(1e9, 1e8, 0.001)
    assert m.op_time(2e9, 1e8) == pytest.approx(2.001)
    assert m.op_time(1e8, 3e8) == pytest.approx(3.001)
    assert m.op_time(0, 1e8, 10) == pytest.approx(1.01)


def test_exact_samples_give_the_machine_back() -> None:
    found = fit(samples())
    m = found.machine
    assert (m.flops_per_s, m.bytes_per_s, m.overhead_s) == pytest.approx((5e10, 8e9, 2e-5), rel=0.01)
    assert found.worst_error < 0.01 and found.samples == 40


def test_the_error_is_that_of_the_samples() -> None:
    data = samples(noise=0.2)
    found = fit(data)
    errors = sorted(abs(found.machine.op_time(f, b, c) / s - 1) for f, b, c, s in data)
    assert found.worst_error == errors[-1] and found.median_error == pytest.approx((errors[19] + errors[20]) / 2)
    assert 0.02 < found.median_error < 0.2


def test_odd_samples_do_not_move_it() -> None:
    data = samples()
    spoiled = [(f, b, c, s * 30) if i % 8 == 0 else (f, b, c, s) for i, (f, b, c, s) in enumerate(data)]
    found = fit(spoiled)
    assert found.machine.flops_per_s == pytest.approx(5e10, rel=0.05)
    assert found.median_error < 0.02 and found.worst_error > 0.9


def test_equal_samples_give_equal_fits() -> None:
    assert fit(samples(noise=0.3)) == fit(samples(noise=0.3))


@pytest.mark.parametrize(
    "data",
    [
        [],
        [(1.0, 1.0, 1.0, 1.0)] * 2,
        [(1.0, 1.0, 1.0, 0.0)] * 3,
        [(1.0, 1.0, 0.0, 1.0)] * 3,
        [(0.0, 1.0, 1.0, 1.0)] * 3,
        [(1.0, 0.0, 1.0, 1.0)] * 3,
    ],
)
def test_what_cannot_be_fitted_is_refused(data: list[Sample]) -> None:
    with pytest.raises(FloorplanError, match="roofline: "):
        fit(data)
