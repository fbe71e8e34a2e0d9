"""The child process that serves one stage: `runtime` is its shell, `tasks` its bookkeeping.

Reading order: `tasks` (what a replica knows of its tasks), `runtime` (the link and the start),
`stepping` and `streaming` (the two forms of backends), `intake` and `outlet` (payloads in and out).
"""
