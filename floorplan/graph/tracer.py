"""The symbolic tracer: keeps in-place ops, decides on sizes, leaves the untraceable as leaves.

y += x          ->   operator.iadd(y, x)          fx alone records an out-of-place add
x[:, 1:] = v    ->   operator.setitem(x, …, v)    fx alone fails
forward fails   ->   call_module, in `opaque` with the reason
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, KeysView, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.graph import decide
from floorplan.graph.decide import Evaluator, Undecided, ValueBranch, checkpointing
from floorplan.graph.leaves import Misfit, Refusal, fits, is_plain_leaf, leaf_reason
from floorplan.graph.proxies import Proxy
from floorplan.graph.quiet import Quiet, in_function
from floorplan.graph.recorded import recording
from floorplan.torch_doors import is_erased, renew, saved_hooks


def _context() -> dict[str, Any]:
    """What a graph cannot record of the place where a node is made, by the reason to refuse it where it changes."""
    kinds = ("cpu", "cuda")
    return {
        "uses activation checkpointing": checkpointing(),
        "keeps tensors by saved-tensor hooks of its own": saved_hooks(),
        "switches autocast on or off": [torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in kinds],
        "computes in a custom autograd.Function": in_function(),
        "computes under torch.inference_mode()": torch.is_inference_mode_enabled(),
    }


class Tracer(fx.Tracer):
    """Traces one model once; `notes`, `opaque` and `lines` are filled on the way."""

    proxy_buffer_attributes = True  # or num_batches_tracked.add_(1) would run while tracing

    def __init__(self, inputs: Sequence[Any], arguments: Sequence[str]) -> None:
        super().__init__()
        self.inputs, self.arguments = inputs, arguments
        self.notes: dict[str, None] = {}
        self.opaque: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        self.asked: tuple[FrameType | None, int, str] | None = None
        self.cache: dict[str, fx.Proxy] = {}
        self.evaluator: Evaluator = cast(Evaluator, None)
        self.refused: ValueBranch | None = None
        self.asks = False  # whether the forward has asked for a size

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of `root`; raises what its own forward raises."""
        self.evaluator = Evaluator(root, self.inputs)
        self.names = {id(t): n for n, t in [*root.named_buffers(), *root.named_parameters()]}
        self.context, self.rng = _context(), torch.get_rng_state()
        self.quiet = Quiet(self, root)
        with recording(root, self.called, self.size):
            graph = super().trace(root, concrete_args)
        if self.refused is not None:  # the forward's own `except` has swallowed it
            raise self.refused
        self._settle(None)
        return graph

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """One placeholder an example input; everything else keeps its default."""
        args: list[Any] = []
        for name, value in zip(self.arguments, self.inputs, strict=True):
            node = self.create_proxy("placeholder", name, (), {})
            args.append(None if value is None else node)
            if value is None:
                self.notes[f"forward: {name} is always None"] = None
        return lambda *given: self.root.forward(*given), args

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The proxy of a node."""
        return Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """torch.nn layers, floorplan's own, and what must not be looked into."""
        if reason := leaf_reason(m):
            self.opaque[module_qualified_name] = reason
        return bool(reason) or is_plain_leaf(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Trace into m, or call it as a whole where that fails."""
        if self.evaluator.running or m not in (self.submodule_paths or {}):
            return forward(*args, **kwargs)
        fits(m, args, kwargs)
        last = next(iter(reversed(self.graph.nodes)), None)
        stack, opaque = self.module_stack.copy(), dict(self.opaque)
        notes, asked = dict(self.notes), self.asked
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as e:
            self.module_stack, self.opaque = stack, opaque
            self.notes, self.asked = notes, asked
            if isinstance(e, Misfit):  # what the forward did before stands, as it does when it runs
                raise
            self._roll_back(last)
            path = self.path_of_module(m)
            self.opaque[path] = reason_of(e)
            self.refused = None
            whole = self.create_proxy("call_module", path, args, kwargs)
            if not isinstance(e, Refusal | ValueBranch | Undecided) and self._raises(whole.node, e):
                del self.opaque[path]
                self._roll_back(last)
                raise
            return whole

    def _raises(self, node: fx.Node, e: Exception) -> bool:
        """Whether the call of a module as a whole raises the same: then its caller is to see it, and may catch it."""
        try:
            self.evaluator.value(node)
        except Undecided as found:
            cause = found.__cause__
            places = [decide.raised_at(x.__traceback__) for x in (cause, e) if x is not None]
            return type(cause) is type(e) and len(set(places)) == 1
        except ValueBranch:
            return False
        return False

    def _roll_back(self, last: fx.Node | None) -> None:
        for node in list(reversed(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            self.lines.pop(node.name, None)
        for name in [n for n, p in self.cache.items() if is_erased(p.node)]:
            del self.cache[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """A proxy for a parameter or buffer, one node each."""
        name = self.names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None or self.evaluator.running:
            return attr_val
        self.cache = parameter_proxy_cache
        if name not in self.cache:
            self.cache[name] = self.create_proxy("get_attr", name, (), {})
        return self.cache[name]

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, with the user's line; Refusal where it is made in a context that a graph cannot record."""
        if kind not in ("output", "get_attr") and (now := _context()) != self.context:
            raise Refusal(next(why for why in now if now[why] != self.context[why]))
        self._settle(decide.calling_frame())
        if target == "self":  # which the code of a graph calls its module
            args = (*args[:2], "self_", *args[3:])
        args = (*self.quiet.across(kind, target, *args[:2]), *args[2:])
        node = self.quiet.made(super().create_node(kind, target, *args, **kwargs))
        if line := decide.place(decide.user_frame()):
            self.lines[node.name] = node.meta["line"] = line
        return node

    def lacks(self, p: fx.Proxy, name: str) -> bool:
        """Whether the tensor that a proxy stands for has no such attribute."""
        try:
            value = self.evaluator.value(p.node)
        except Exception:  # cannot be evaluated: nothing is known about it
            return False
        return isinstance(value, Tensor) and not hasattr(value, name)

    def create_arg(self, a: Any) -> Any:
        """A graph argument; ordered dicts and dataclass dicts stay what they are."""
        if type(a) is Proxy:
            return a.node
        if isinstance(a, fx.proxy.Attribute):
            renew(a)
        if isinstance(a, dict) and type(a) is not dict:
            if type(a) is collections.OrderedDict:
                pairs = [(k, self.create_arg(v)) for k, v in a.items()]
                return self.create_node("call_function", collections.OrderedDict, (pairs,), {})
            if dataclasses.is_dataclass(a):
                values = {k: self.create_arg(v) for k, v in a.items()}
                return self.create_node("call_function", type(a), (), values)
        if isinstance(a, Tensor) and id(a) not in self.names and not isinstance(a, nn.Parameter):
            self._constant(a)
        return super().create_arg(a)

    def _constant(self, t: Tensor) -> None:
        if t.requires_grad:
            raise Refusal("computes with parameters in a way that tracing cannot follow")
        if t in self.tensor_attrs:
            name = self.tensor_attrs[t]
            what = f"the plain tensor attribute {name} becomes a buffer"
        elif not torch.equal(self.rng, torch.get_rng_state()):
            raise Refusal("draws random numbers, which tracing would freeze")
        else:
            what = "a tensor made in forward becomes a constant buffer"
        self._note(decide.user_frame(), what)

    def _note(self, frame: FrameType | None, text: str) -> None:
        self.notes[": ".join(p for p in (decide.place(frame), text) if p)] = None

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a branch for the sizes of the example inputs."""
        frame = decide.user_frame()
        answer = bool(self._ask(lambda: self.evaluator.scalar(obj.node, bool)))
        if not _rank_only(obj.node):
            self.asks = True
            sizes = self.evaluator.sizes()
            asked = decide.expression(frame) or obj.node.name
            self._note(frame, f"branch decided for input sizes {sizes}: {asked} is {answer}")
        return answer

    def _ask(self, question: Callable[[], Any]) -> Any:
        frame = decide.user_frame()
        where, line = decide.place(frame), decide.source_line(frame)
        try:
            return question()
        except ValueBranch:
            text = f"{where}: branches on tensor values (`{line}`)"
            self.refused = ValueBranch(text.removeprefix(": "))
            raise self.refused from None
        except Undecided as e:
            raise Undecided(f"{where}: `{line}` {e}") from e

    def number(self, obj: fx.Proxy, kind: Callable[[Any], Any]) -> Any:
        """int(), float() or index() of a size."""
        value = self._ask(lambda: self.evaluator.scalar(obj.node, cast(type, kind)))
        self.asks = True
        frame = decide.calling_frame()
        sizes, line = self.evaluator.sizes(), decide.source_line(decide.user_frame())
        note = f"{decide.place(decide.user_frame())}: a size is fixed at {value} for input sizes {sizes}: {line}"
        self._settle(None)
        self.asked = (frame, frame.f_lasti if frame else -1, note)
        return value

    def _settle(self, frame: FrameType | None) -> None:
        """Keep the last question's note, unless torch only looked and then recorded a node."""
        if self.asked is not None:
            asker, at, note = self.asked
            self.asked = None
            if frame is None or frame is not asker or frame.f_lasti != at:
                self.notes[note] = None

    def called(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a function that is a node as it is."""
        return self.create_proxy("call_function", f, args, kwargs)

    def size(self, obj: Any) -> Any:
        """len() in the model's own code: of a tensor it is a size, which the graph takes again when it runs."""
        if isinstance(obj, fx.Proxy) and not self.evaluator.running:
            if isinstance(self._ask(lambda: self.evaluator.value(obj.node)), Tensor):
                return cast(Any, obj).size(0)
        return len(obj)

    def length(self, obj: fx.Proxy) -> int:
        """len() of a traced container or tensor."""
        value = self._ask(lambda: self.evaluator.value(obj.node))
        answer = len(value)
        if not isinstance(value, torch.Size):
            self.asks, sizes = True, self.evaluator.sizes()
            self._note(decide.user_frame(), f"length taken as {answer} for input sizes {sizes}")
        return answer

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unroll a loop over a traced container or tensor."""
        value, node = self._ask(lambda: self.evaluator.value(obj.node)), obj.node
        if not isinstance(value, torch.Size):
            self.asks, sizes, n = True, self.evaluator.sizes(), len(value)
            self._note(decide.user_frame(), f"loop unrolled {n} times for input sizes {sizes}")
        if isinstance(value, Tensor):
            obj = cast(fx.Proxy, torch.unbind(cast(Any, obj)))
        if isinstance(value, dict | KeysView):
            return iter(list(value))
        if node.op == "call_method" and node.target in ("items", "values"):
            owner = self.proxy(cast(fx.Node, node.args[0]))
            keys = list(self.evaluator.value(owner.node))
            pairs = [(k, cast(Any, owner)[k]) for k in keys]
            return iter(pairs if node.target == "items" else [v for _, v in pairs])
        return iter([cast(Any, obj)[i] for i in range(len(value))])


def _rank_only(node: fx.Node) -> bool:
    """Whether a decision looks at nothing but numbers of dimensions."""
    inputs = node.all_input_nodes
    return bool(inputs) and all(
        (n.op == "call_method" and n.target == "dim") or (n.target is getattr and n.args[1] == "ndim") for n in inputs
    )


def reason_of(e: Exception) -> str:
    """One line on why a forward could not be traced."""
    if isinstance(e, ValueBranch | Undecided):
        return str(e)
    where = decide.raised_at(e.__traceback__)
    text = " ".join(str(e).split())[:200]
    what = text if isinstance(e, Refusal) else f"{type(e).__name__}: {text}"
    return f"{where}: {what}" if where else what
