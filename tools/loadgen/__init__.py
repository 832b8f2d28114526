"""`python -m tools.loadgen`: open-loop load on a live OpenAI-compatible endpoint, and what came of it."""
