"""What a user sees when something cannot be done: one line, no traceback."""


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
