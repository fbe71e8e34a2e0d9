"""The asynchronous shell around the router: sockets become events, commands become writes.

It decides nothing. One serial dispatcher (`dispatcher`) calls the router; `links` and `channels` are
where events come from; `executor` is where commands go; `shell` puts them together.
"""
