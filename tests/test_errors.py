"""Words: lines cut to size, amounts, what a terminal can show."""

import pytest

from floorplan.errors import amount, clean, describe, fault_of_sizes, first_line, one_line, short


@pytest.mark.parametrize(
    "nbytes,text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345, "12.3 kB"), (999_949, "999.9 kB"), (999_950, "1.00 MB"),
     (84e6, "84.00 MB"), (1.5e9, "1,500.00 MB")],
)  # fmt: skip
def test_amounts(nbytes: float, text: str) -> None:
    assert amount(nbytes) == text


def test_what_a_terminal_can_show() -> None:
    assert clean("a\x1b[2J\u202eb\ud800") == "a\ufffd[2J\ufffdb\ufffd" and clean("é …") == "é …"


def test_values_of_a_file_on_one_line() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert short(loop) == "a list" and short(3) == "3" and short("a\nb") == r"'a\nb'"
    assert short("x" * 100) == "'" + "x" * 76 + "..." and len(short("x" * 100)) == 80
    assert one_line(" a\n  b\tc\x00 ") == "a b c?" and one_line("x" * 300) == "x" * 239 + "…"
    assert one_line("abcd", 3) == "ab…" and one_line("abc", 3) == "abc"


def test_errors_on_one_line() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one" and first_line(KeyError()) == "KeyError"
    assert len(first_line(ValueError("x" * 300))) == 200
    assert describe(ValueError("a\nb")) == "ValueError: a b" and describe(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("error", "sizes"),
    [
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x4 and 5x6)"), True),
        (RuntimeError("Given groups=1, weight of size [8, 3, 3, 3], expected input to have 3 channels"), True),
        (ValueError("Expected more than 1 value per channel when training"), True),
        (RuntimeError("Kernel size can't be greater than actual input size"), True),
        (IndexError("index 7 is out of bounds for dimension 1 with size 3"), True),
        (AssertionError(), True),
        (TypeError("forward() got an unexpected keyword argument 'lengths'"), False),
        (KeyError("image_size"), False),
        (AttributeError("'Tensor' object has no attribute 'sizes'"), False),
        (RuntimeError("expected scalar type Long but found Float"), False),
        (NotImplementedError("no kernel"), False),
    ],
)
def test_other_sizes_are_asked_for_where_sizes_are_at_fault(error: Exception, sizes: bool) -> None:
    assert fault_of_sizes(error) is sizes
