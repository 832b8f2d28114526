"""Makes and judges the step predictor of a profile from recorded denoising traces."""
