"""`make bench`: measures what BENCHMARKS.md reports, on the machine it runs on."""
