"""Which instance runs which request: one scheduler acts, others stand by. `policy.py` decides."""
