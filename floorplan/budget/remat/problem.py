"""A graph's values as numbers for the minimum cut: bytes, work, what is needed, what may not be computed again."""

from collections.abc import Iterator, Sequence

from torch import fx

from floorplan.budget.remat.study import Value, sources
from floorplan.cost_models.mincut import Cut, boundaries, cheapest_cut

PRICES = (1.0, 0.25, 1 / 16, 1 / 64, 1 / 256, 0.0)  # bytes that one operation is taken to be worth
_UNIT = 1024  # prices are rounded to this part of a byte
_SMALL = 2000  # what is below this share of all that is kept is left alone


class Problem:
    """The graph's values as numbers, in the order of the nodes."""

    def __init__(self, gm: fx.GraphModule, values: dict[str, Value]) -> None:
        self.values = values
        nodes = list(gm.graph.nodes)
        self.names = [n.name for n in nodes]
        self.at = {name: i for i, name in enumerate(self.names)}
        self.inputs = [[self.at[s] for s in sources(n, values)] for n in nodes]
        owners = dict.fromkeys(o for name in self.names for o in values[name].saves if o)
        needed = [o for o in owners if not values[o].written and values[o].nbytes]
        small = sum(values[o].nbytes for o in needed) // _SMALL
        self.small = {name for name in self.names if values[name].owner == name and values[name].nbytes < small}
        self.needed = [self.at[o] for o in needed if o not in self.small]
        made = [values[name] for name in self.names]
        self.sizes = [v.nbytes * _UNIT if v.owner == v.node and not v.written else None for v in made]
        self.fixed = [self._fixed(n) for n in nodes]

    def _fixed(self, n: fx.Node) -> bool:
        """Whether a node's value is only to be had by keeping it."""
        v = self.values[n.name]
        overwritten = bool(v.owner and self.values[v.owner].written)
        return bool(v.refused) or overwritten or n.op in ("placeholder", "output") or n.name in self.small

    def candidates(self, prices: Sequence[float]) -> Iterator[frozenset[str]]:
        """The nodes to compute again, for every price and division of the graph."""
        for crossing in self._divisions():
            for price in prices:
                cut = self._cut(price, crossing)
                if cut is not None and cut.recomputed:
                    yield frozenset(self.names[i] for i in cut.recomputed)

    def _cut(self, price: float, crossing: set[int]) -> Cut | None:
        costs = [round(self.values[name].cost * price * _UNIT) for name in self.names]
        prices = [None if self.fixed[i] or i in crossing else cost for i, cost in enumerate(costs)]
        try:
            return cheapest_cut(self.sizes, self.inputs, self.needed, prices)
        except ValueError:  # a view that no computation may cross, of memory that may not be kept
            return None

    def _divisions(self) -> Iterator[set[int]]:
        """The values that cross the divisions: none, then those of ever smaller parts."""
        last: dict[int, int] = {}  # number of a value that has memory of its own -> that of the last node that reads it
        for i, us in enumerate(self.inputs):
            for u in us:
                owner = self.values[self.names[u]].owner
                last[self.at[owner] if owner else u] = i
        crossing = [[u for u, end in last.items() if u < i <= end] for i in range(len(self.names))]
        sizes = [sum(self.values[self.names[u]].nbytes for u in us) for us in crossing]
        needed = set(self.needed)
        weights = [self.values[name].nbytes if i in needed else 0 for i, name in enumerate(self.names)]
        limit = sum(weights)
        yield set()
        while limit > max(weights, default=0):
            limit //= 2
            yield {u for i in boundaries(weights, sizes, limit) for u in crossing[i]}

    def refusals(self) -> Iterator[str]:
        """Why a value that is kept is never computed again, by node."""
        for i in self.needed:
            v = self.values[self.names[i]]
            if v.refused:
                yield f"{v.node}: kept, not computed again: {v.refused}"
        for v in self.values.values():
            if v.written and any(v.node in w.saves for w in self.values.values()):
                yield f"{v.node}: kept, not computed again: {v.written} overwrites it"
