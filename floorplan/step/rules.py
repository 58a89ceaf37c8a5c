"""Straight-line rules: what the forward and the backward of a node become.

    FusedConv          q = bottleneck(x); z = conv_site(x); z += skip; bits = gate_(z)
                       g = ungate_(g, bits); gU += <g, q>; gx = input_grad(g)
    ChannelAffine      y = affine_(x)                 g = affine_grad_(g)
    PackedActivation   bits, y = act_(x)              g = ungate_(g, bits)
    a + b              a += b                         g, g

A node without a rule runs under autograd (step_region), and is reported.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from floorplan.layers.activations import ACTIVATIONS, PackedActivation
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import out_size
from floorplan.step.ir import Instr, Names
from floorplan.step.ops import trains
from floorplan.torch_doors import hooks_of, tensors_of


@dataclass
class Context:
    """What the rules of one stage write to; values and gradients are named after graph nodes."""

    gm: fx.GraphModule
    values: dict[str, Any]  # node -> its value on fakes
    learns: set[str]  # nodes whose value needs a gradient
    rules: dict[str, "Rule"]  # node -> its rule
    branches: frozenset[str]  # sites that run as two branches
    reuse: frozenset[str]  # sites whose input gradient takes the output gradient's buffer
    names: Names  # what values and gradients are called
    refs: dict[str, str]  # module path -> name in the source
    stream: int = 0  # hidden channels at a time in inverted residuals
    forward: list[Instr] = field(default_factory=list)
    backward: list[Instr] = field(default_factory=list)
    grads: dict[str, str] = field(default_factory=dict)  # node -> name of its gradient so far

    def module(self, node: fx.Node) -> Any:
        """The module that a node calls."""
        return self.gm.get_submodule(str(node.target))

    def ref(self, node: fx.Node) -> str:
        """The name of a module in the source."""
        if (path := str(node.target)) not in self.refs:
            self.refs[path] = self.names.fresh(f"s{len(self.refs)}")
        return self.refs[path]

    def of(self, node: fx.Node, role: str = "") -> str:
        """The name of a node's value, or of what else it has under a role: q, b, n, …"""
        return self.names.of(role, node.name)

    def fresh(self, node: fx.Node) -> str:
        """A name for a new gradient of a node."""
        return self.names.fresh(f"g_{node.name}")

    def arrive(self, node: fx.Node, g: str, at: fx.Node) -> None:
        """A gradient of node's value; a second one is added to the first."""
        if node.name not in self.learns:
            return
        if (old := self.grads.get(node.name)) is not None:
            given, g = g, self.fresh(node)
            self.backward.append(_sum(at, g, (old, given)))
        self.grads[node.name] = g


@dataclass(frozen=True)
class Rule:
    """forward(context, node) now; backward(context, node, name of its gradient) later."""

    forward: Callable[[Context, fx.Node], None]
    backward: Callable[[Context, fx.Node, str], None]


def _sum(at: fx.Node, out: str, reads: tuple[str, str]) -> Instr:
    return Instr(at.name, (out,), "total({0}, {1})", reads, inplace="total_({0}, {1})", commutes=True)


def shape_of(c: Context, x: fx.Node, user: fx.Node) -> str:
    """The name of a value's shape, noted where `user` reads it."""
    name = c.of(x, "n")
    if not any(name in i.out for i in c.forward):
        c.forward.append(Instr(user.name, (name,), "tuple({0}.shape)", (c.of(x),)))
    return name


def _site_forward(c: Context, node: fx.Node) -> None:
    s, ref, x = c.module(node), c.ref(node), tensors(node)[0]
    branch = node.name in c.branches
    q = c.of(node, "q")
    if trains(s) or (branch and s.rank):
        c.forward.append(Instr(node.name, (q,), f"bottleneck({{0}}, {ref})", (c.of(x),)))
    if x.name in c.learns:
        shape_of(c, x, node)
    read = (c.of(x), q) if branch and s.rank else (c.of(x),)
    used = "{1}" if branch and s.rank else "None"
    c.forward.append(Instr(node.name, (conv_name(c, node),), f"conv_site({{0}}, {ref}, {used}, {branch})", read))
    close(c, node)


def conv_name(c: Context, node: fx.Node) -> str:
    """The name of a site's conv, which its skip is added to."""
    return c.of(node, "" if len(tensors(node)) == 1 else "z")


def close(c: Context, node: fx.Node) -> None:
    """A site's skip and activation."""
    s, ref, (_, *skips), learns = c.module(node), c.ref(node), tensors(node), node.name in c.learns
    for skip in skips:
        reads = (conv_name(c, node), c.of(skip))
        c.forward.append(Instr(node.name, (c.of(node),), "{0} + {1}", reads, inplace="total_({0}, {1})"))
    if s.act is None:
        return
    bits = (c.of(node, "b"),) if learns else ()
    code = f"gate_({{0}}, {ref})" if learns else f"act_({{0}}, {ref}.act)"
    c.forward.append(Instr(node.name, bits, code, (c.of(node),)))


def opened(c: Context, node: fx.Node, g: str) -> str:
    """The gradient behind a site's activation, which its skip takes too."""
    if c.module(node).act is not None:
        g = _ungated(c, node, g, f"{c.ref(node)}.gate")
    for skip in tensors(node)[1:]:
        c.arrive(skip, _summed(c, node, g, skip), node)
    return g


def _site_backward(c: Context, node: fx.Node, g: str) -> None:
    s, ref, x = c.module(node), c.ref(node), tensors(node)[0]
    branch = node.name in c.branches
    g = opened(c, node, g)
    if trains(s):
        code = f"accumulate({ref}.U, up_gradient({{0}}, {{1}}, {ref}))"
        c.backward.append(Instr(node.name, (), code, (g, c.of(node, "q"))))
    if x.name not in c.learns:
        return
    old, out, shape = c.grads.get(x.name), c.fresh(x), shape_of(c, x, node)
    if old is not None:
        code = f"total({{0}}, input_grad({{1}}, {ref}, {{2}}, {branch}))"
        into = f"add_input_grad_({{0}}, {{1}}, {ref}, {branch})"
        c.backward.append(Instr(node.name, (out,), code, (old, g, shape), inplace=into))
    else:
        reuse = node.name in c.reuse and c.values[x.name].shape == c.values[node.name].shape
        into = f"input_grad_({{0}}, {ref}, {branch})" if reuse else ""
        code = f"input_grad({{0}}, {ref}, {{1}}, {branch})"
        c.backward.append(Instr(node.name, (out,), code, (g, shape), inplace=into))
    c.grads[x.name] = out


def _ungated(c: Context, node: fx.Node, g: str, gate: str) -> str:
    out, call = c.fresh(node), f"({{0}}, {{1}}, {gate})"
    c.backward.append(Instr(node.name, (out,), f"ungate{call}", (g, c.of(node, "b")), inplace=f"ungate_{call}"))
    return out


def _summed(c: Context, node: fx.Node, g: str, skip: fx.Node) -> str:
    """The gradient of a skip that was broadcast."""
    if skip.name not in c.learns or c.values[skip.name].shape == c.values[node.name].shape:
        return g
    out, reads = c.fresh(skip), (g, shape_of(c, skip, node))
    c.backward.append(Instr(node.name, (out,), "{0}.sum_to_size({1})", reads, shares=(g,), fresh=False))
    return out


def _affine_forward(c: Context, node: fx.Node) -> None:
    (x,), ref = tensors(node), c.ref(node)
    c.forward.append(Instr(node.name, (c.of(node),), f"{ref}({{0}})", (c.of(x),), inplace=f"affine_({{0}}, {ref})"))


def _affine_backward(c: Context, node: fx.Node, g: str) -> None:
    (x,), ref = tensors(node), c.ref(node)
    if x.name in c.learns:
        out, call = c.fresh(node), f"({{0}}, {ref})"
        c.backward.append(Instr(node.name, (out,), f"affine_grad{call}", (g,), inplace=f"affine_grad_{call}"))
        c.arrive(x, out, node)


def _act_forward(c: Context, node: fx.Node) -> None:
    (x,), ref = tensors(node), c.ref(node)
    if node.name in c.learns:
        c.forward.append(Instr(node.name, (c.of(node, "b"),), f"bits_of({{0}}, {ref}.act)", (c.of(x),)))
    into = f"act_({{0}}, {ref}.act)" if ACTIVATIONS[type(c.module(node).act)].inplace else ""
    c.forward.append(Instr(node.name, (c.of(node),), f"{ref}.act({{0}})", (c.of(x),), inplace=into))


def _act_backward(c: Context, node: fx.Node, g: str) -> None:
    (x,) = tensors(node)
    if x.name in c.learns:
        c.arrive(x, _ungated(c, node, g, f"gate_of({c.ref(node)}.act)"), node)


def _add_forward(c: Context, node: fx.Node) -> None:
    a, b = tensors(node)
    c.forward.append(_sum(node, c.of(node), (c.of(a), c.of(b))))


def _add_backward(c: Context, node: fx.Node, g: str) -> None:
    for x in tensors(node):
        c.arrive(x, g, node)


RULES = {"site": Rule(_site_forward, _site_backward), "affine": Rule(_affine_forward, _affine_backward)}
RULES |= {"activation": Rule(_act_forward, _act_backward), "add": Rule(_add_forward, _add_backward)}
_ADDS = (operator.add, operator.iadd, torch.add)


def tensors(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in order."""
    return [a for a in node.args if isinstance(a, fx.Node)]


def rule_of(node: fx.Node, gm: fx.GraphModule, values: dict[str, Any]) -> Rule | None:
    """The rule of a node, None if it runs under autograd."""
    args: list[Any] = [values.get(a.name) for a in tensors(node)]
    if len(args) != len(node.args) or node.kwargs or not args or not all(_floats(a) for a in args):
        return None
    if any(a.op == "get_attr" for a in tensors(node)) or not _floats(values.get(node.name)):
        return None
    if node.op == "call_function" and node.target in _ADDS:
        same = len(args) == 2 and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
        return RULES["add"] if same and args[0].dim() > 2 else None
    if node.op != "call_module":
        return None
    return _module_rule(gm.get_submodule(str(node.target)), args, values[node.name])


def _module_rule(m: Any, args: list[Tensor], out: Tensor) -> Rule | None:
    if hooks_of(m) or any(t is not None and t.requires_grad for name, t in tensors_of(m).items() if name != "U"):
        return None
    if type(m) is FusedConv and not m.plain and args[0].dim() == len(m.geo.kernel) + 2:
        fills = [args[0].shape[0], m.out_channels, *out_size(args[0].shape, m.geo)] == list(out.shape)
        skip = len(args) == 1 or (args[1].dim() == out.dim() and args[1].dtype == out.dtype)
        return RULES["site"] if fills and skip else None
    if type(m) is ChannelAffine and args[0].dim() > 2:
        return RULES["affine"]
    if type(m) is PackedActivation and m.act is not None and not ACTIVATIONS[type(m.act)].moded:
        return RULES["activation"]
    return None


def _floats(v: Any) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()
