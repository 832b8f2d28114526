"""`make bench-engine`: the engine against a plain implementation of the reference algorithm, on random weights."""
