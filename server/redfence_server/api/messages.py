"""Translate between proto messages and checked values; an error names the invalid field."""

from __future__ import annotations

import math
from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from redfence_proto.v1 import lock_pb2
from redfence_server import model
from redfence_server.api.open_streams import SessionPage
from redfence_server.errors import InvalidFieldError
from redfence_server.lock_list import Page
from redfence_server.lock_service import ForcedRelease, LockView, RenewOutcome
from redfence_server.locking.node import Durability, Held, NodeReport, NodeState, NoReply, Reply
from redfence_server.locking.quorum import RenewVerdict, TokenJudgement, TokenVerdict
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.nodes.cluster import ClusterView
from redfence_server.waiting.acquiring import NotGranted

# As google/protobuf/duration.proto says: about 10,000 years.
_DURATION_SECONDS_MAX = 315_576_000_000
_NUMBER_DIGITS_MAX = 18


def duration(milliseconds: float) -> Duration:
    """Return a wire duration in whole milliseconds; a negative one becomes zero."""
    whole = max(0, int(milliseconds))
    return Duration(seconds=whole // 1000, nanos=whole % 1000 * 1_000_000)


def _fill_duration(wire: Duration, milliseconds: int) -> None:
    """Write a duration of whole milliseconds that is not negative."""
    wire.seconds, wire.nanos = milliseconds // 1000, milliseconds % 1000 * 1_000_000


def _nanoseconds(message: Message, field: str) -> int | None:
    """Return a duration field in ns, or None if it is unset.

    Raises:
        ValueError: the standard does not allow the duration.
    """
    if not message.HasField(field):
        return None
    wire: Duration = getattr(message, field)
    in_range = abs(wire.seconds) <= _DURATION_SECONDS_MAX and abs(wire.nanos) < 1_000_000_000
    if not in_range:
        raise ValueError(
            "is outside the range of a Duration: seconds within ±315,576,000,000, nanos within ±999,999,999"
        )
    if wire.seconds * wire.nanos < 0:
        raise ValueError("is not a valid Duration: its seconds and nanos have different signs")
    return wire.seconds * 1_000_000_000 + wire.nanos


def _ttl_ms(request: lock_pb2.AcquireRequest, *, ttl_ms_max: int) -> int:
    try:
        nanoseconds = _nanoseconds(request, "ttl")
    except ValueError as error:
        raise model.invalid_ttl(str(error), ttl_ms_max=ttl_ms_max) from error
    if nanoseconds is not None and nanoseconds % 1_000_000:
        raise model.invalid_ttl(f"is {nanoseconds} ns; whole milliseconds are needed", ttl_ms_max=ttl_ms_max)
    return model.check_ttl_ms(
        None if nanoseconds is None else nanoseconds // 1_000_000, ttl_ms_max=ttl_ms_max
    )


def _wait_ms(request: lock_pb2.AcquireRequest) -> int:
    reason = lock_pb2.ERROR_REASON_INVALID_WAIT_TIMEOUT
    try:
        nanoseconds = _nanoseconds(request, "wait_timeout") or 0
    except ValueError as error:
        raise InvalidFieldError("wait_timeout", str(error), reason) from error
    if nanoseconds < 0:
        shown = f"{nanoseconds} ns" if nanoseconds % 1_000_000 else f"{nanoseconds // 1_000_000} ms"
        raise InvalidFieldError("wait_timeout", f"is {shown}; it must not be negative", reason)
    return nanoseconds // 1_000_000


def _lock_delay_ms(request: lock_pb2.AcquireRequest, *, ttl_ms: int, ttl_ms_max: int) -> int:
    reason = lock_pb2.ERROR_REASON_INVALID_LOCK_DELAY
    try:
        nanoseconds = _nanoseconds(request, "lock_delay") or 0
    except ValueError as error:
        raise InvalidFieldError("lock_delay", str(error), reason) from error
    if nanoseconds % 1_000_000:
        raise InvalidFieldError("lock_delay", f"is {nanoseconds} ns; whole milliseconds are needed", reason)
    return model.check_lock_delay_ms(nanoseconds // 1_000_000, ttl_ms=ttl_ms, ttl_ms_max=ttl_ms_max)


def read_acquire(
    request: lock_pb2.AcquireRequest,
    *,
    ttl_ms_max: int,
    new_lease_id: Callable[[], str],
    arrived_at_ms: float,
    connection: str,
    peer: str,
    answer_within_ms: float | None = None,
) -> AcquireCall:
    """Return an Acquire request as a checked call.

    Raises:
        InvalidFieldError: a field is malformed or out of bounds.
    """
    ttl_ms, has_delay = _ttl_ms(request, ttl_ms_max=ttl_ms_max), request.HasField("lock_delay")
    return AcquireCall(
        resource=model.check_resource(request.resource),
        lease_id=LeaseId(request.lease_id or new_lease_id()),
        ttl_ms=ttl_ms,
        holder=model.check_holder(request.holder),
        wait_ms=_wait_ms(request),
        arrived_at_ms=arrived_at_ms,
        answer_within_ms=answer_within_ms,
        connection=connection,
        peer=peer,
        lock_delay_ms=_lock_delay_ms(request, ttl_ms=ttl_ms, ttl_ms_max=ttl_ms_max) if has_delay else 0,
    )


def read_lease(request: lock_pb2.ReleaseRequest | lock_pb2.KeepAliveRequest) -> tuple[str, LeaseId]:
    """Return the resource and the lease id of a request.

    Raises:
        InvalidFieldError: a field is malformed.
    """
    return model.check_resource(request.resource), LeaseId(request.lease_id)


def read_get_lock(request: lock_pb2.GetLockRequest) -> tuple[str, str]:
    """Return the resource and the digest of the lease id to look for; the digest is empty if none is given.

    Raises:
        InvalidFieldError: a field is malformed.
    """
    resource = model.check_resource(request.resource)
    return resource, LeaseId(request.lease_id).digest if request.lease_id else ""


def fill_acquire(response: lock_pb2.AcquireResponse, call: AcquireCall, outcome: Lease | NotGranted) -> None:
    """Write the answer to an Acquire into an empty message."""
    if isinstance(outcome, Lease):
        response.outcome = lock_pb2.ACQUIRE_OUTCOME_GRANTED
        lease = response.lease
        lease.resource = call.resource
        lease.lease_id = call.lease_id.secret
        lease.fencing_token = outcome.token
        _fill_duration(lease.ttl, call.ttl_ms)
        _fill_duration(lease.validity, outcome.validity_ms)
        return
    waited, held = lock_pb2.ACQUIRE_OUTCOME_WAIT_TIMEOUT, lock_pb2.ACQUIRE_OUTCOME_HELD
    response.outcome = waited if outcome.waited else held
    response.position = outcome.position
    if (current := current_hold(outcome.current)) is not None:
        response.current.CopyFrom(current)


def fill_release(response: lock_pb2.ReleaseResponse, was_held: bool) -> None:  # noqa: FBT001  (its only content)
    """Write the answer to a Release into an empty message."""
    released, not_held = lock_pb2.RELEASE_OUTCOME_RELEASED, lock_pb2.RELEASE_OUTCOME_NOT_HELD
    response.outcome = released if was_held else not_held


_STATES = {
    RenewVerdict.ACTIVE: (lock_pb2.LEASE_STATE_ACTIVE, lock_pb2.LEASE_STATE_REASON_UNSPECIFIED),
    RenewVerdict.AT_RISK: (lock_pb2.LEASE_STATE_AT_RISK, lock_pb2.LEASE_STATE_REASON_QUORUM_UNAVAILABLE),
    RenewVerdict.LOST: (lock_pb2.LEASE_STATE_LOST, lock_pb2.LEASE_STATE_REASON_NOT_HELD),
    RenewVerdict.FORCED: (lock_pb2.LEASE_STATE_LOST, lock_pb2.LEASE_STATE_REASON_FORCED),
}


def fill_renewal(
    response: lock_pb2.KeepAliveResponse, request: lock_pb2.KeepAliveRequest, renewed: RenewOutcome
) -> None:
    """Write the answer to one renewal into an empty message."""
    response.resource, response.sequence = request.resource, request.sequence
    response.state, response.reason = _STATES[renewed.verdict]
    if renewed.verdict is RenewVerdict.ACTIVE:
        response.fencing_token = renewed.token
        _fill_duration(response.validity, renewed.validity_ms)


def get_lock_response(resource: str, view: LockView) -> lock_pb2.GetLockResponse:
    """Return the answer to a GetLock."""
    return lock_pb2.GetLockResponse(
        resource=resource,
        current=current_hold(view.current),
        waiters=view.queue.count,
        nodes=[_node_hold(index, answer) for index, answer in enumerate(view.nodes)],
        queue=[
            lock_pb2.QueuedAcquire(holder=holder, waited=duration(waited_ms))
            for holder, waited_ms in view.queue.first
        ],
        position=view.queue.position,
    )


def check_token_response(judgement: TokenJudgement) -> lock_pb2.CheckTokenResponse:
    """Answer a CheckToken."""
    is_live = judgement.verdict is TokenVerdict.LIVE
    state = lock_pb2.TOKEN_STATE_LIVE if is_live else lock_pb2.TOKEN_STATE_NOT_LIVE
    return lock_pb2.CheckTokenResponse(state=state, current=current_hold(judgement.current))


def force_release_response(ended: ForcedRelease) -> lock_pb2.ForceReleaseResponse:
    """Return the answer to a ForceRelease."""
    if ended.was_held:
        outcome = lock_pb2.FORCE_RELEASE_OUTCOME_RELEASED
    elif ended.current is None:
        outcome = lock_pb2.FORCE_RELEASE_OUTCOME_NOT_HELD
    else:
        outcome = lock_pb2.FORCE_RELEASE_OUTCOME_OTHER_TOKEN
    return lock_pb2.ForceReleaseResponse(outcome=outcome, current=current_hold(ended.current))


def list_locks_response(page: Page) -> lock_pb2.ListLocksResponse:
    """Return the answer to a ListLocks."""
    locks = [
        lock_pb2.ListedLock(resource=each.resource, current=current_hold(each.current), waiters=each.waiters)
        for each in page.locks
    ]
    return lock_pb2.ListLocksResponse(locks=locks, next_page_token=page.next_token)


def read_number(page_token: str) -> int:
    """Return the number in a page token of ListSessions; 0 for the first page.

    Raises:
        InvalidFieldError: the token is not one of ListSessions.
    """
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdecimal() and len(page_token) <= _NUMBER_DIGITS_MAX):
        problem = "is not one that a server has answered; begin without it"
        raise InvalidFieldError("page_token", problem, lock_pb2.ERROR_REASON_INVALID_PAGE)
    return int(page_token)


def list_sessions_response(page: SessionPage) -> lock_pb2.ListSessionsResponse:
    """Return the answer to a ListSessions."""
    return lock_pb2.ListSessionsResponse(
        sessions=[
            lock_pb2.OpenSession(
                number=each.number,
                kind=each.kind,
                peer=each.peer,
                age=duration(each.age_ms),
                unanswered=each.unanswered,
                waiting=each.waiting or 0,
            )
            for each in page.sessions
        ],
        next_page_token=str(page.sessions[-1].number) if page.has_more else "",
    )


_ANSWERS = {
    NoReply.TIMED_OUT: lock_pb2.NODE_ANSWER_TIMED_OUT,
    NoReply.UNREACHABLE: lock_pb2.NODE_ANSWER_UNREACHABLE,
    NoReply.QUARANTINED: lock_pb2.NODE_ANSWER_UNREACHABLE,
    NoReply.DISCONNECTED: lock_pb2.NODE_ANSWER_UNREACHABLE,
    NoReply.REFUSED: lock_pb2.NODE_ANSWER_REFUSED,
    NoReply.NOT_ADMITTED: lock_pb2.NODE_ANSWER_REFUSED,
}


def _node_hold(index: int, answer: Reply | None) -> lock_pb2.NodeHold:
    if isinstance(answer, NoReply):
        return lock_pb2.NodeHold(node_index=index, answer=_ANSWERS[answer])
    hold = current_hold(answer) if isinstance(answer, Held) else None
    return lock_pb2.NodeHold(node_index=index, answer=lock_pb2.NODE_ANSWER_ANSWERED, hold=hold)


def current_hold(hold: Held | None) -> lock_pb2.CurrentHold | None:
    """Return a hold as the contract shows it: `remaining` is without the lock delay while the lease holds."""
    if hold is None:
        return None
    remaining_ms = hold.remaining_ms if hold.closed else hold.remaining_ms - hold.lock_delay_ms
    return lock_pb2.CurrentHold(
        holder=hold.holder,
        fencing_token=hold.token,
        remaining=duration(remaining_ms),
        lock_delay=duration(hold.lock_delay_ms) if hold.lock_delay_ms else None,
        closed=hold.closed,
    )


_NODE_STATES = {
    NodeState.JOINING: lock_pb2.NODE_STATE_JOINING,
    NodeState.READY: lock_pb2.NODE_STATE_READY,
    NodeState.QUARANTINED: lock_pb2.NODE_STATE_QUARANTINED,
    NodeState.UNREACHABLE: lock_pb2.NODE_STATE_UNREACHABLE,
}
_DURABILITIES = {
    Durability.UNKNOWN: lock_pb2.DURABILITY_UNSPECIFIED,
    Durability.PROVEN: lock_pb2.DURABILITY_PROVEN,
    Durability.DECLARED: lock_pb2.DURABILITY_DECLARED,
    Durability.NONE: lock_pb2.DURABILITY_NONE,
}


def cluster_status_response(view: ClusterView, *, server_version: str) -> lock_pb2.ClusterStatusResponse:
    """Return the answer to a ClusterStatus."""
    return lock_pb2.ClusterStatusResponse(
        cluster_id=view.cluster_id,
        quorum=view.quorum,
        nodes=[_node_status(index, report) for index, report in enumerate(view.nodes)],
        max_ttl=duration(view.ttl_ms_max),
        server_version=server_version,
    )


def _node_status(index: int, report: NodeReport) -> lock_pb2.NodeStatus:
    status = lock_pb2.NodeStatus(
        index=index,
        address=report.address,
        state=_NODE_STATES[report.state],
        detail=report.detail,
        run_id=report.run_id,
        since=duration(report.since_ms),
        high=report.max_token,
        durability=_DURABILITIES[report.durability],
        clock_distrusted_for=duration(math.ceil(report.clock_distrusted_ms)),
        state_changes=report.state_changes,
        grant_refusal=report.grant_refusal,
    )
    if report.latency_ms is not None:
        status.latency.FromMicroseconds(int(report.latency_ms * 1000))
    if report.clock_offset_ms is not None:
        # Not by `duration`, because an offset may be negative.
        status.clock_offset.FromMicroseconds(round(report.clock_offset_ms * 1000))
    return status
