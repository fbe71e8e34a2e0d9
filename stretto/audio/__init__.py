"""Audio as bytes: formats, headers and sizes.

It must not know models or HTTP, and it needs no third-party package: API processes import it.
"""
