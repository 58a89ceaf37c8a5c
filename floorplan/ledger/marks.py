"""Know a node where it is not walked: in the generated code of a graph, and in autograd's own graph.

    conv = self.conv(x)             mark = enter('conv');  conv = self.conv(x)
    relu = torch.relu(conv)   ->    mark_1 = enter('relu');  relu = torch.relu(conv)

When a value is let go is as before: the marks hold nothing.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx

from floorplan.ledger.storage import StorageTracker
from floorplan.torch_doors import number_of, saved_names, storage_key, tensors_in


def marked(gm: fx.GraphModule, enter: Callable[[str], Any]) -> fx.GraphModule:
    """The same modules and code, which calls enter(name) before each node."""
    graph = copy.deepcopy(gm.graph)  # keeps the names

    def mark(node: str) -> None:
        enter(node)

    for n in [n for n in graph.nodes if n.op not in ("placeholder", "output")]:
        with graph.inserting_before(n):
            graph.call_function(mark, (n.name,))
    return fx.GraphModule(gm, graph)


def keepers_of(loss: Tensor | None, tracker: StorageTracker) -> dict[int, str]:
    """Number of each living storage that autograd keeps -> the graph node that was the first to save it.

    Read from autograd's graph after the forward, so no hook changes what the run does.
    """
    first: dict[int, int] = {}
    for node in _graph_of(loss):
        number = number_of(node)
        for t in _saved_by(node) if tracker.maker_of(number) is not None else ():
            if (index := tracker.alive.get(storage_key(t))) is not None:
                first[index] = min(number, first.get(index, number))
    return {index: tracker.maker_of(number) or "" for index, number in first.items()}


def _graph_of(loss: Tensor | None) -> Iterator[Any]:
    """Every autograd node under a result, once."""
    root = None if loss is None else loss.grad_fn
    seen: set[Any] = {root}
    todo: list[Any] = [] if root is None else [root]
    while todo:
        node = todo.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)


def _saved_by(node: Any) -> Iterator[Tensor]:
    kind: Any = type(node)
    for name in saved_names(kind):
        try:
            value = getattr(node, name)
        except (RuntimeError, AttributeError):  # overwritten since, or not there: the backward will say so
            continue
        yield from tensors_in(value)
    yield from tensors_in(dict(getattr(node, "__dict__", {})))
