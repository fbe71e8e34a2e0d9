"""The router in a simulated world on virtual time."""
