"""The pure heart: `Router.handle(event) -> commands`. No I/O, no clock, no tasks, no logging.

Read `graph` (what is deployed), `events` and `commands` (the vocabulary), then `router` (the table).
"""
