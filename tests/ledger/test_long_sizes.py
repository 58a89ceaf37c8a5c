"""A symbolic run whose comparisons get ever longer is given up, and the report says why."""

import pytest
import sympy

from floorplan.errors import TraceError
from floorplan.ledger.sizes import TOO_LONG, Sized


def test_long_comparisons_end_the_run() -> None:
    env = Sized()
    assert env.evaluate_expr(sympy.true) is sympy.true
    with pytest.raises(TraceError, match=TOO_LONG):
        env.evaluate_expr(sympy.Add(*sympy.symbols("s:200", integer=True, positive=True)) > 3)
