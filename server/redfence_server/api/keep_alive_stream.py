"""Serve one KeepAlive call: proto in, proto out. lock_service.py decides."""

from __future__ import annotations

from functools import partial

from redfence_proto.v1 import lock_pb2
from redfence_server.api import errors, messages
from redfence_server.api.streams import Stream, StreamContext
from redfence_server.lock_service import LockCalls, RenewOutcome
from redfence_server.sharing.shares import Shares


class KeepAliveStream(Stream[lock_pb2.KeepAliveResponse]):
    """Serves one KeepAlive call."""

    def __init__(
        self,
        context: StreamContext,
        *,
        service: LockCalls,
        commands_max: int,
        draining: lock_pb2.Draining,
        shares: Shares,
        peer: str,
    ) -> None:
        super().__init__(
            context,
            shares=shares,
            peer=peer,
            commands_max=commands_max,
            batch_max=1,
            notice=lock_pb2.KeepAliveResponse(draining=draining),
        )
        self._service = service
        # The renewals of each lease in the order of their requests; None until one has ended.
        self._renewals: dict[tuple[str, str], dict[int, lock_pb2.KeepAliveResponse | None]] = {}
        self._count = 0

    @property
    def kind(self) -> lock_pb2.SessionKind.ValueType:
        """See `Stream`."""
        return lock_pb2.SESSION_KIND_KEEP_ALIVE

    def _on_protocol_error(self) -> None:
        """Do nothing: every renewal ends within two node timeouts and `REVALIDATION_MS_MAX`."""

    def _clean_up(self) -> None:
        """Do nothing: closing a KeepAlive releases nothing."""

    async def _write(self, items: list[lock_pb2.KeepAliveResponse]) -> None:
        for response in items:
            await self._context.write(response)

    async def _begin(self, request: lock_pb2.KeepAliveRequest) -> None:
        await self._shares.turns.begin(self._peer)
        self._commands.begin()
        self._count += 1
        self._renewals.setdefault((request.resource, request.lease_id), {})[self._count] = None
        on_end = partial(self._on_end, request, self._count)
        try:
            self._service.begin_renew(*messages.read_lease(request), on_end)
        except Exception as error:
            on_end(error)

    def _on_end(self, request: lock_pb2.KeepAliveRequest, number: int, end: RenewOutcome | Exception) -> None:
        """Answer the renewals of one lease in order.

        Otherwise a renewal that waits for a slow node could report ACTIVE after a later one reported LOST.
        """
        lease = (request.resource, request.lease_id)
        renewals = self._renewals[lease]
        renewals[number] = _answer_renewal(request, end)
        while renewals and (response := next(iter(renewals.values()))) is not None:
            del renewals[next(iter(renewals))]
            self._commands.answer(response)
        if not renewals:
            del self._renewals[lease]


def _answer_renewal(
    request: lock_pb2.KeepAliveRequest, end: RenewOutcome | Exception
) -> lock_pb2.KeepAliveResponse:
    if isinstance(end, RenewOutcome):
        response = lock_pb2.KeepAliveResponse()
        messages.fill_renewal(response, request, end)
        return response
    failed = errors.to_message(*errors.describe(end, where="keepalive"))
    return lock_pb2.KeepAliveResponse(resource=request.resource, sequence=request.sequence, error=failed)
