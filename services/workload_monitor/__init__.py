"""What is asked for: how often, how large, how urgent."""
