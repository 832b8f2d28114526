"""Which threshold each running request gets, by its deadline and by the load. `policy.py` decides."""
