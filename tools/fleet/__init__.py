"""Simulated instances on a real bus: live workers whose engine sleeps. For clusters larger than the machine."""
