"""What a user is told: the errors, and words on one line."""

import re


class FloorplanError(Exception):
    """A one-line message: what went wrong, where (file, node), what to do about it."""


class LoadError(FloorplanError):
    """A model file, factory or weights file that cannot be used."""


class TraceError(FloorplanError):
    """A model whose forward cannot be captured or run on fake tensors."""


class ReadsValues(TraceError):
    """A forward that branches on tensor values: it runs on real tensors only."""


class PassError(FloorplanError):
    """A pass that broke the graph; names the passes that had already run."""


def amount(nbytes: float) -> str:
    """Bytes for people, MB = 1e6: "84.00 MB", "12.3 kB", "640 B"."""
    if nbytes >= 999_950:
        return f"{nbytes / 1e6:,.2f} MB"
    return f"{nbytes / 1e3:.1f} kB" if nbytes >= 1000 else f"{nbytes:.0f} B"


def clean(text: str) -> str:
    """Text that a terminal or a font can show: no control or formatting characters, no lone surrogates."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def short(value: object) -> str:
    """A file's own value, made safe to print on one line: containers may hold themselves."""
    if not isinstance(value, str | int | float | None):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def one_line(text: object, limit: int = 240) -> str:
    """`text` on one line, printable, cut to `limit` characters."""
    flat = " ".join(str(text).split())
    flat = "".join(c if c.isprintable() else "?" for c in flat)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def describe(error: BaseException, limit: int = 240) -> str:
    """An exception as `Type: message` on one line."""
    return one_line(f"{type(error).__name__}: {error}".rstrip(": "), limit)


_OF_SIZES = re.compile(
    r"size|shape|dim(ension)?s?\b|channel|kernel|broadcast|expand|length|elements?\b|stride|range|bounds|too small",
    re.I,
)


def fault_of_sizes(error: BaseException) -> bool:
    """Whether inputs of other sizes may be what is missing: not for what a forward does not know or take at all."""
    wrong = isinstance(error, TypeError | KeyError | AttributeError | NameError | ImportError | NotImplementedError)
    return not wrong and bool(isinstance(error, AssertionError) or _OF_SIZES.search(str(error)))
