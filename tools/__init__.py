"""Command-line tools: they may import services; nothing imports them but tests and benchmarks."""
