"""Amounts of memory as users write them."""

import pytest

from floorplan.budget.amount import bytes_of
from floorplan.errors import FloorplanError


def test_budgets_are_read() -> None:
    assert bytes_of("32MB") == 32_000_000
    assert bytes_of("32MiB") == 33_554_432 == bytes_of("33554432") == bytes_of(33_554_432)
    assert bytes_of("1.5 kB") == 1500 and bytes_of("32") == 32


@pytest.mark.parametrize("bad", ["lots", "-1MB", "0", "3 parsecs", "", True])
def test_what_is_no_amount_is_refused(bad: str) -> None:
    with pytest.raises(FloorplanError, match="^--budget "):
        bytes_of(bad)
