"""Answer what tracing asks about sizes, by running the graph so far on fake tensors.

    if a.shape[-1] != b.shape[-1]:   ->   ne = operator.ne(getitem, getitem_1);  True on the fakes

Nothing is run until the first question. Every node runs once, in order, so in-place ops count.
"""

import linecache
import operator
import os
import sys
from collections.abc import Sequence
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from floorplan.torch_doors import VALUES_ASKED, FakeTensor, FakeTensorMode, tree_leaves, tree_map

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_FX = os.path.join(_TORCH, "fx") + os.sep
_HERE = os.path.dirname(__file__)  # this file cannot import the modules that it names: they import it
_OWN = frozenset(os.path.join(_HERE, n) for n in ("decide.py", "proxies.py", "tracer.py"))
_OUTER = os.path.join(_HERE, "trace.py")


class ValueBranch(Exception):
    """A decision that depends on the values in a tensor."""


class Undecided(Exception):
    """A decision that fake tensors cannot make."""


def _users(filename: str) -> bool:
    return not filename.startswith((_TORCH, "<")) and filename not in _OWN


def user_frame() -> FrameType | None:
    """The innermost frame of the traced model's own code, if any."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code.co_filename == _OUTER:
            break
        if _users(frame.f_code.co_filename):
            return frame
    return None


def models_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours, of a model that runs; None if ours called torch's."""
    ours, passed = os.path.dirname(_HERE) + os.sep, False
    for frame, _ in walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, ours, "<")):
            return frame
        if passed and name.startswith(ours):
            return None
        passed = passed or name.startswith(_MODULES)
    return None


def calling_frame() -> FrameType | None:
    """The innermost frame outside fx and the tracer; it may be torch's own."""
    names = ((f, f.f_code.co_filename) for f, _ in walk_stack(sys._getframe(1)))
    return next((f for f, name in names if not name.startswith((_FX, "<")) and name not in _OWN), None)


def place(frame: FrameType | None) -> str:
    """`file.py:12` of a frame; "" for none."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


def raised_at(trace: TracebackType | None) -> str:
    """`file.py:12` of the innermost user frame of a traceback; "" if there is none."""
    steps = ((frame.f_code.co_filename, line) for frame, line in walk_tb(trace))
    users = [f"{os.path.basename(name)}:{line}" for name, line in steps if _users(name) and name != _OUTER]
    return users[-1] if users else ""


def source_line(frame: FrameType | None) -> str:
    """The source line a frame stands at, without its colon."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().rstrip(":") if frame else ""


def expression(frame: FrameType | None) -> str:
    """The source text of the expression being evaluated, or its whole line."""
    if frame is None:
        return ""
    spans = list(frame.f_code.co_positions())
    first, last, start, end = spans[frame.f_lasti // 2]
    if first is None or first != last or start is None or end is None:
        return source_line(frame)
    raw = linecache.getline(frame.f_code.co_filename, first).encode()
    return raw[start:end].decode(errors="replace").strip() or source_line(frame)


class Evaluator:
    """Values of graph nodes on fake tensors of the example inputs' sizes."""

    def __init__(self, root: nn.Module, inputs: Sequence[Any]) -> None:
        self.root, self.inputs = root, inputs
        self.running = False  # the tracer's patches stand aside meanwhile
        self.mode: FakeTensorMode | None = None
        self.values: dict[fx.Node, Any] = {}  # an exception for a node that could not run on fakes

    def sizes(self) -> str:
        """The example inputs' sizes, for notes."""
        leaves = tree_leaves(list(self.inputs))
        return ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else repr(t) for t in leaves)

    def value(self, node: fx.Node) -> Any:
        """The node's value on fakes; Undecided or ValueBranch if it has none."""
        if self.mode is None:
            self.mode = FakeTensorMode(allow_non_fake_inputs=True)
            self.fakes = [tree_map(self._fake, v) for v in self.inputs]
        self.running = True
        try:
            with self.mode:
                for n in node.graph.nodes:
                    if n not in self.values:
                        self.values[n] = self._run(n)
                    if n is node:
                        break
        finally:
            self.running = False
        found = self.values[node]
        if isinstance(found, VALUES_ASKED):
            raise ValueBranch() from found
        if isinstance(found, Exception):
            raise Undecided(f"cannot be decided on fake tensors: {type(found).__name__}: {found}") from found
        return found

    def scalar(self, node: fx.Node, kind: type) -> Any:
        """bool, int or float of a node's value; ValueBranch if a tensor's content decides."""
        value = self.value(node)
        try:
            with cast(FakeTensorMode, self.mode):
                return kind(value)
        except VALUES_ASKED as e:
            raise ValueBranch() from e
        except Exception as e:
            raise Undecided(f"cannot be read as {kind.__name__}: {e}") from e

    def _run(self, n: fx.Node) -> Any:
        try:
            args, kwargs = map_arg((n.args, n.kwargs), self._load)
            return self._call(n, args, kwargs)
        except Exception as e:
            return e

    def _load(self, n: fx.Node) -> Any:
        if isinstance(value := self.values[n], Exception):
            raise value
        return value

    def _call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        if n.op == "placeholder":
            return self.fakes[[p for p in n.graph.nodes if p.op == "placeholder"].index(n)]
        if n.op == "get_attr":
            return self._fake(operator.attrgetter(str(n.target))(self.root))
        if n.op == "call_function":
            return cast(Any, n.target)(*args, **kwargs)
        if n.op == "call_method":
            return getattr(args[0], str(n.target))(*args[1:], **kwargs)
        m = self.root.get_submodule(str(n.target))
        state = {k: self._fake(t) for k, t in [*m.named_parameters(), *m.named_buffers()]}
        return torch.func.functional_call(m, state, args, kwargs)

    def _fake(self, t: Any) -> Any:
        mode = cast(FakeTensorMode, self.mode)
        if not isinstance(t, Tensor):
            return t
        if not isinstance(t, FakeTensor):
            return mode.from_tensor(t, static_shapes=True)
        if t.fake_mode is mode:
            return t
        size, stride = ([d if isinstance(d, int) else int(d.node.hint) for d in dims] for dims in (t.shape, t.stride()))
        with mode:
            twin = torch.empty_strided(size, stride, dtype=t.dtype, device=t.device)
        return twin.requires_grad_(t.requires_grad)


def checkpointing() -> bool:
    """Whether torch.utils.checkpoint is computing what runs now, reentrant or not, by whatever name it was called."""
    within = (f for f, _ in walk_stack(sys._getframe(1)) if f.f_globals is vars(torch.utils.checkpoint))
    return any(not f.f_code.co_qualname.startswith("checkpoint_sequential") for f in within)  # its end is a plain call
