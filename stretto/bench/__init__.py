"""Measuring a running server; nothing of the server may import it."""
