"""The loop that the compacting passes share: one module for another, all its calls at once."""

from collections.abc import Callable, Iterator

from torch import fx, nn

from floorplan.graph.driver import Site


def swap(gm: fx.GraphModule, twin: Callable[[nn.Module], nn.Module | str | None]) -> Iterator[Site]:
    """Put twin(m) in the place of every module m; a Site a call. A text says why m stays, None says nothing of it."""
    calls_by_target: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls_by_target.setdefault(str(node.target), []).append(node)
    for target, calls in calls_by_target.items():
        module = gm.get_submodule(target)
        if (new := twin(module)) is None:
            continue
        why = new if isinstance(new, str) else _overwrites(module, calls)
        if isinstance(new, nn.Module) and not why:
            gm.set_submodule(target, new)
        for node in calls:
            yield Site(node.name, why)


def _overwrites(module: nn.Module, calls: list[fx.Node]) -> str:
    """Why an in-place module must stay in place: somebody reads its input after it; else ""."""
    if not getattr(module, "inplace", False):
        return ""
    for node in calls:
        for user in (u for source in node.all_input_nodes for u in source.users):
            if user is not node and node < user:
                return f"{user.name} reads what {node.name} writes in place; set inplace=False"
    return ""
