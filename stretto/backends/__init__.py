"""One stage's model behind one contract: `contract`, the built-in backends, and how a name is found.

Backends are imported only inside a replica.
"""
