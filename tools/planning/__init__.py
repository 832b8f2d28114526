"""The reconfigurator over a recorded curve of request rates."""
