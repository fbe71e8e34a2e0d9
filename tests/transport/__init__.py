"""Frames, connections, the payload codec and the payload store."""
