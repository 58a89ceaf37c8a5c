"""The passes, in the order they run."""

from floorplan.graph.driver import Pass
from floorplan.passes import canonicalize, compact_dropout, compact_pools, fold_batchnorm, fuse_sites, pack_gates


def pipeline(adapter: Pass) -> tuple[Pass, ...]:
    """The passes of a method whose adapters stand in folded, fused sites."""
    before = (canonicalize.PASS, fold_batchnorm.PASS)
    return (*before, adapter, fuse_sites.PASS, pack_gates.PASS, compact_pools.PASS, compact_dropout.PASS)
