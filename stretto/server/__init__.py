"""The HTTP edge: an ASGI application over an engine, and the server that runs it.

It must not know models, replicas' processes or how requests are routed.
"""
