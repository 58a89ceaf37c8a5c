"""Computing again instead of keeping, exactly, from the cheapest cut of the graph."""
