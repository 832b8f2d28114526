"""`make bench-slo`: what each way of choosing thresholds is worth, on a live stack under load."""
