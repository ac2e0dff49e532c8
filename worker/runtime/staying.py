"""How a member whose stream broke comes back: through all coordinators, for as long as its world runs.

A stream that breaks is no end: another one is opened, on which the member proves that it belongs to the world
(protos/v1/membership.proto). What was agreed goes on meanwhile, and also when all coordinators stay away
(negotiator.py does the rest).
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

import grpc

from horovod.base.errors import without_code
from horovod.worker.runtime.channel import resolve
from horovod.worker.runtime.errors import StartError

if TYPE_CHECKING:
    from horovod.worker.runtime.local_member import LocalMember

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 1.0
GOODBYE_ROUNDS = 2  # rounds through all coordinators: the one that was under way, and another


def stay(member: LocalMember) -> None:
    """Opens one stream after another, until the world is over for this process or its goodbye is said.

    Runs in the member's thread, which alone has the variables below. A member that is closed while its stream is
    away has no time to lose: each coordinator is tried once more, at once. Without a goodbye it would count as lost.
    """
    broken_at, delay, warned = time.monotonic(), FIRST_RETRY_SECONDS, False
    rounds_left = GOODBYE_ROUNDS
    while True:
        with member.changed:
            if member.final:
                return
            waits = not _go_on(member)
            if waits and member.goodbye is None:
                # The delay is random, so that the members of a large world do not come all at once.
                member.changed.wait_for(lambda: member.closing, delay * random.uniform(0.5, 1.0))
            elif waits:
                rounds_left -= 1
            if rounds_left == 0 or member.final:
                return
        began = time.monotonic()
        end = _come_back(member)
        was_attached = member.attached
        member.on_end(*end)
        lasted = time.monotonic() - began > LAST_RETRY_SECONDS
        if waits:
            delay = min(2 * delay, LAST_RETRY_SECONDS)
        if was_attached and lasted:
            delay = FIRST_RETRY_SECONDS
        if was_attached:
            broken_at, warned = time.monotonic(), False
        elif not warned and not member.final and time.monotonic() - broken_at > member.grace_seconds:
            warned = True
            log.warning(
                "The coordinator at %s can't be reached: %s Operations that every rank knows go on; this process "
                "keeps trying to come back.",
                member.streams.address,
                without_code(member.reason),
            )


def _go_on(member: LocalMember) -> bool:
    """To the coordinator that the last one named, or the next one. False when it is time to wait first."""
    redirect, member.redirect = member.redirect, ""
    coordinators = member.streams.coordinators
    if redirect and coordinators.lead(redirect):
        return True
    return not coordinators.turn()


def _come_back(member: LocalMember) -> tuple[grpc.StatusCode, str]:
    """Runs one more stream of the member until it ends; returns how it ended."""
    streams = member.streams
    connection = streams.coordinators.current
    try:
        metadata = connection.metadata()
    except StartError as error:  # another user's process listens there, which must not see the token
        return grpc.StatusCode.UNAVAILABLE, str(error)
    addresses = resolve(connection.host, connection.port)
    with member.changed:
        if member.final:
            return grpc.StatusCode.CANCELLED, "the session is closed"
        streams.addresses |= addresses
        try:
            member.stream = streams.open(metadata, attach=member.attach_request())
        except ValueError as error:  # the channel is closed
            return grpc.StatusCode.CANCELLED, str(error)
    return member.stream.read(member.on_event)
