"""From a model to a graph, and how a graph is edited and rewritten."""
