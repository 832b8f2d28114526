"""Says how many more steps and blocks each running request needs, at every threshold of the profile."""
