"""The passes, in the order they run."""

from floorplan.graph.driver import Pass
from floorplan.passes import (
    canonicalize,
    compact_dropout,
    compact_pools,
    fold_batchnorm,
    fuse_sites,
    insert_memflora,
    pack_gates,
)


def pipeline(adapter: Pass) -> tuple[Pass, ...]:
    """The passes of a method, its adapter set with options."""
    return tuple(adapter if p is insert_memflora.memflora else p for p in PIPELINE)  # type: ignore[misc]


PIPELINE = (
    canonicalize.PASS,
    fold_batchnorm.PASS,
    insert_memflora.memflora,  # the method's adapter, made with its options
    fuse_sites.PASS,
    pack_gates.PASS,
    compact_pools.PASS,
    compact_dropout.PASS,
)
