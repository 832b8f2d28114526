"""The secrets of a deployment: keys of the services for NATS, certificates, an API key."""
