"""What a graph of ours may call: layers, their ops, and the torch functions that a file may name."""
