"""Commands become writes, started processes and timers. One `match`; it decides nothing."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, assert_never

from stretto.core import commands as do
from stretto.messages import channel, link
from stretto.orchestrator.channels import Channels, number_of
from stretto.transport.pulling import payload_token
from stretto.types import Launcher, LaunchSpec, ReplicaId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stretto.config.process_specs import OrchestratorSpec
    from stretto.orchestrator.calls import CallValues
    from stretto.orchestrator.door import Door
    from stretto.orchestrator.links import Links
    from stretto.orchestrator.payloads import PayloadTable


ALIVE_PER_TIMEOUT = 6
"""How often a replica that holds tasks tells that it goes on, per progress timeout."""


class Executor:
    """Executes commands in the order they come; synchronous and total.

    Work that takes time (starting a process) is begun here and answers with an event.

    Args:
        spec: What this orchestrator process was told.
        links: To replicas.
        channels: To API processes.
        payloads: Inline bytes.
        calls: Arguments and results of calls.
        launcher: Starts and kills replica processes.
        replica_address: Where replicas connect.
        on_exit: Called when everything has been stopped.
        door: Where replicas from other hosts join, if they may.
    """

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        spec: OrchestratorSpec,
        links: Links,
        channels: Channels,
        payloads: PayloadTable,
        calls: CallValues,
        launcher: Launcher,
        replica_address: str,
        on_exit: Callable[[], None],
        door: Door | None = None,
    ) -> None:
        self._spec = spec
        self._links = links
        self._channels = channels
        self._payloads = payloads
        self._calls = calls
        self._launcher = launcher
        self._replica_address = replica_address
        self._on_exit = on_exit
        self._door = door
        self._stages = {stage.id: stage for stage in spec.settings.stages}

    def execute(  # noqa: C901, PLR0912, PLR0915 - one arm per command
        self, command: do.AnyCommand
    ) -> None:
        """Carry out one command."""
        match command:
            case do.Emit():
                self._emit(command)
            case do.Feed():
                self._feed(command)
            case do.Release():
                self._links.release(command.payload)
            case do.Grant():
                self._to_replica(
                    command.replica, link.Grant(command.task, command.chunks, command.bytes)
                )
            case do.Dispatch():
                self._dispatch(command)
            case do.CloseInput():
                self._to_replica(command.replica, link.CloseInput(command.task, command.edge))
            case do.CancelTask():
                self._to_replica(command.replica, link.Cancel(command.task))
            case do.Finish():
                message = channel.Finished(number_of(command.request), command.timings)
                self._channels.send(command.channel, message)
            case do.Fail():
                message = channel.Failed(number_of(command.request), command.failure)
                self._channels.send(command.channel, message)
            case do.Cancelled():
                self._channels.send(command.channel, channel.Cancelled(number_of(command.request)))
            case do.Reject():
                message = channel.Rejected(number_of(command.request), command.failure)
                self._channels.send(command.channel, message)
            case do.AcknowledgeAbort():
                message = channel.AbortAcknowledged(number_of(command.request), command.stopped)
                self._channels.send(command.channel, message)
            case do.Announce():
                self._channels.broadcast(channel.ReplicaNotice(command.state))
            case do.AnnounceTarget():
                self._channels.broadcast(channel.TargetNotice(command.stage, command.replicas))
            case do.AnswerOrder():
                answer = channel.Answer(command.number, "", command.failure)
                self._channels.send(command.channel, answer)
            case do.StartReplica():
                self._start(command.replica)
            case do.AdmitReplica():
                assert self._door is not None, "nobody could have offered itself"
                self._door.admit(command, self._launch_spec)
            case do.RefuseReplica():
                assert self._door is not None, "nobody could have offered itself"
                self._door.refuse(command)
            case do.DrainReplica():
                self._links.drain(command.replica)
            case do.StopReplica():
                self._links.forget(command.replica)
                self._launcher.stop(command.replica)
            case do.CallReplica():
                self._call(command)
            case do.AnswerRpc():
                results = self._calls.end(command)
                message = channel.CallAnswered(number_of(command.call), results, command.failure)
                self._channels.send(command.channel, message)
            case do.Exit():
                self._on_exit()
            case _:
                assert_never(command)

    def _to_replica(self, replica: ReplicaId, message: link.Down) -> None:
        found = self._links.find(replica)
        if found is not None:
            found.send(message)

    def _emit(self, command: do.Emit) -> None:
        payload = None if command.payload is None else self._payloads.on_wire(command.payload)[0]
        message = channel.Output(
            number_of(command.request),
            command.output,
            command.seq,
            payload,
            command.offset,
            command.length,
            command.kind,
            command.media_s,
            command.final,
            command.timings,
        )
        self._channels.send(command.channel, message, command.payload)

    def _feed(self, command: do.Feed) -> None:
        found = self._links.find(command.replica)
        if found is not None:
            payload, body = self._payloads.on_wire(command.payload)
            found.send(link.Feed(command.task, command.edge, command.seq, payload), body)

    def _dispatch(self, command: do.Dispatch) -> None:
        found = self._links.find(command.replica)
        if found is None:
            return
        options, body = None, None
        if command.options is not None:
            options, body = self._payloads.on_wire(command.options)
        found.next_seq[command.task] = 0
        message = link.Open(
            command.task,
            command.pipeline,
            command.edges,
            options,
            command.skip_units,
            command.chunks,
            command.bytes,
            command.resume,
            command.resume_units,
        )
        found.send(message, body)

    def _call(self, command: do.CallReplica) -> None:
        found = self._links.find(command.replica)
        if found is not None:
            found.calls[command.call] = None
            arguments = self._calls.arguments(command.call)
            found.send(link.Call(command.call, command.method, command.call_class, arguments))

    def _start(self, replica: ReplicaId) -> None:
        nonce = secrets.token_hex(16)
        owner = f"{replica.stage}-{replica.slot}-{replica.incarnation}"
        self._links.expect(replica, nonce, owner)
        self._launcher.start(self._launch_spec(replica, nonce, owner, {}), self._links.exited)

    def _launch_spec(
        self, replica: ReplicaId, nonce: str, owner: str, runtime: Mapping[str, object]
    ) -> LaunchSpec:
        stage = self._stages[replica.stage]
        return LaunchSpec(
            replica=replica,
            run=self._spec.run,
            address=self._replica_address,
            shared_memory_dir=self._spec.shared_memory_dir,
            nonce=nonce,
            backend=stage.backend,
            options=stage.options,
            runtime={
                "slots": stage.slots,
                "recovery": stage.recovery,
                "alive_every_s": stage.progress_timeout_s / ALIVE_PER_TIMEOUT,
                "max_batch": stage.max_batch,
                "max_wait_ms": stage.max_wait_ms,
                "threads": stage.threads,
                "device": stage.device,
                "memory_bytes": stage.memory_bytes,
                "module_folders": self._spec.settings.module_folders,
                "shared_memory_bytes": stage.shared_memory_bytes,
                "payload_owner": owner,
                "payload_token": payload_token_of(self._spec),
                **runtime,
            },
            environment=stage.environment,
        )


def payload_token_of(spec: OrchestratorSpec) -> str:
    """Return what gives access to payload files of other hosts; empty if there are no other hosts."""
    if spec.join_fd is None:
        return ""
    return payload_token(spec.settings.orchestrator.join_token, spec.run)
