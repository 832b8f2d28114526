"""Denoising traces: what each step of many requests saw and committed; and replays of it at other thresholds."""
