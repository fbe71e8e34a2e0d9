"""Starts processes and watches them: replicas for the orchestrator, the orchestrator for its owner.

Every process is started by command line in a process group of its own and is watched by pidfd.
This package must not know what the processes do, nor decide which replicas there should be.
"""
