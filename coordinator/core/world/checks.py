"""Whether a join request can be used: by itself, and beside the members that wait already.

The bounds keep a broken or hostile member harmless.
"""

import ipaddress
from collections.abc import Mapping

from horovod.base.errors import WorldCode, coded
from horovod.base.protocol import MAX_WORLD_MESSAGE_BYTES, PROTOCOL_VERSION, __version__
from horovod.base.words import capitalized, plural, process_in_words, release_in_words, shortened
from horovod.protos.v1 import membership_pb2 as pb
from horovod.protos.v1 import types_pb2

from .waiting import Waiting, bytes_of, sizes_of, sizes_of_world

MAX_SIZE = 1 << 16
MAX_NAME_LENGTH = 256
MAX_VALUE_LENGTH = 4096
MAX_ENTRIES = 256
MAX_OPTIONS_LENGTH = 64 << 10  # characters of all options of one request, of which each waiting request has a copy
MAX_PROOF_BYTES = 64
MAX_WAITING_BYTES = 256 << 20  # bytes of all requests of a job that wait, options included
MAX_REASON_LENGTH = 64 << 10  # characters that a member says about itself or its peers
MAX_SETTLE_S = 3600


def refusal_of(request: pb.JoinRequest) -> str:
    """The sentence why the request can't be used, or ""."""
    rank = request.requested_rank if request.HasField("requested_rank") else None
    host = request.host.name if _is_name(request.host.name) else "unknown"
    who = process_in_words(rank, request.pid, host)
    if request.protocol_version != PROTOCOL_VERSION:
        return coded(WorldCode.OTHER_VERSION, _other_protocol(who, request.version, request.protocol_version))
    for what, text in (("job", request.job), ("member_id", request.member_id), ("host.name", request.host.name)):
        if not _is_name(text):
            return coded(
                WorldCode.INVALID_REQUEST,
                f"The {what} in a join request must be 1 to {MAX_NAME_LENGTH} printable characters, but it is "
                f"{text[:80]!r}.",
            )
    if refusal := _refusal_of_sizes(request, who):
        return refusal
    if len(request.options) > MAX_ENTRIES or len(request.endpoints) > MAX_ENTRIES:
        return coded(
            WorldCode.INVALID_REQUEST,
            f"A join request may have at most {MAX_ENTRIES} options and endpoints; {who} sent more.",
        )
    texts = [
        request.version,
        request.host.shared_memory_domain,
        request.segment_address,
        request.process.namespace,
        *request.options.keys(),
        *request.options.values(),
        *(endpoint.address for endpoint in request.endpoints),
        *(endpoint.interface for endpoint in request.endpoints),
    ]
    if any(len(text) > MAX_VALUE_LENGTH for text in texts):
        return coded(
            WorldCode.INVALID_REQUEST,
            f"No text in a join request may be longer than {MAX_VALUE_LENGTH} characters; {who} sent a longer one.",
        )
    if sum(len(name) + len(value) for name, value in request.options.items()) > MAX_OPTIONS_LENGTH:
        return coded(
            WorldCode.INVALID_REQUEST,
            f"The options of a join request may have at most {MAX_OPTIONS_LENGTH} characters; {who} sent more.",
        )
    if len(request.rejoin.proof) > MAX_PROOF_BYTES:
        return coded(WorldCode.INVALID_REQUEST, f"The proof in the join request of {who} is none: it is too long.")
    for option in request.options:
        if not _is_name(option):
            return coded(
                WorldCode.INVALID_REQUEST,
                f"The name of an option must be 1 to {MAX_NAME_LENGTH} printable characters, but {who} sent "
                f"{option[:80]!r}.",
            )
    for endpoint in request.endpoints:
        if problem := _problem_of(endpoint):
            return coded(
                WorldCode.INVALID_REQUEST,
                f"{capitalized(who)} offers to be reached at {endpoint.address[:80]!r} and port "
                f"{endpoint.port}, but {problem}. Its network interfaces must have numeric addresses that others can "
                "connect to; see HOROVOD_NETWORK_INTERFACES.",
            )
    return ""


def _other_protocol(who: str, version: str, protocol: int) -> str:
    return (
        f"{capitalized(who)} has {release_in_words(version)} (protocol {protocol}), but the coordinator has Horovod "
        f"{__version__} (protocol {PROTOCOL_VERSION}), and these do not understand each other. Install releases with "
        "the same first number on both."
    )


def _refusal_of_sizes(request: pb.JoinRequest, who: str) -> str:
    size, sizes = request.size, sizes_of(request)
    if sizes.is_elastic:
        if not 1 <= sizes.fewest <= sizes.most <= MAX_SIZE:
            return coded(
                WorldCode.INVALID_SIZE,
                f"The fewest and the most members of an elastic job must be numbers from 1 to {MAX_SIZE}, the smaller "
                f"one first, but {who} asks for {sizes.fewest} and {sizes.most}; see HOROVOD_MIN_SIZE and "
                "HOROVOD_MAX_SIZE.",
            )
        if size and not sizes.fewest <= size <= sizes.most:
            return coded(
                WorldCode.INVALID_SIZE,
                f"{capitalized(who)} waits for a first world of {plural(size, 'member')}, but worlds of its job have "
                f"{sizes}; see HOROVOD_SIZE, HOROVOD_MIN_SIZE and HOROVOD_MAX_SIZE.",
            )
        if not 0 <= request.settle_seconds <= MAX_SETTLE_S:
            return coded(
                WorldCode.INVALID_REQUEST,
                f"The settle time of an elastic job must be 0 to {MAX_SETTLE_S} seconds, but {who} asks for "
                f"{request.settle_seconds:g}; see HOROVOD_ELASTIC_SETTLE_SECONDS.",
            )
        if not request.patience_seconds >= 0:
            return coded(
                WorldCode.INVALID_REQUEST,
                f"A process waits 0 seconds or longer for one that holds the state, but {who} says "
                f"{request.patience_seconds:g}; see HOROVOD_ELASTIC_TIMEOUT.",
            )
        return ""
    if not 1 <= size <= MAX_SIZE:
        return coded(
            WorldCode.INVALID_SIZE,
            f"The size of a world must be 1 to {MAX_SIZE}, but {who} asks for {size}; see HOROVOD_SIZE.",
        )
    if request.HasField("requested_rank") and request.requested_rank >= size:
        return coded(
            WorldCode.INVALID_RANK,
            f"{capitalized(who)} asks for a rank outside 0 to {size - 1}, the ranks of a world of size "
            f"{size}; see HOROVOD_RANK and HOROVOD_SIZE.",
        )
    return ""


def _problem_of(endpoint: types_pb2.Endpoint) -> str:
    """Why no member could connect to the endpoint, or ""."""
    if not 0 < endpoint.port < 1 << 16:
        return "a port is a number from 1 to 65535"
    try:
        address = ipaddress.ip_address(endpoint.address)
    except ValueError:
        return "that is no numeric address"
    return "that is no address to connect to" if address.is_unspecified or address.is_multicast else ""


def refusal_of_attach(attach: pb.Attach) -> str:
    """The sentence why the request of a member that comes back can't be used, or ""."""
    if attach.protocol_version != PROTOCOL_VERSION:
        who = f"rank {attach.rank} (pid {attach.pid}) of job {attach.job[:80]!r}"
        return coded(WorldCode.OTHER_VERSION, _other_protocol(who, attach.version, attach.protocol_version))
    if not _is_name(attach.job):
        return coded(
            WorldCode.INVALID_REQUEST,
            f"The job of a member must be 1 to {MAX_NAME_LENGTH} printable characters, not {attach.job[:80]!r}.",
        )
    for what, text in (
        ("member_id", attach.member_id),
        ("namespace", attach.process.namespace),
        ("version", attach.version),
    ):
        if len(text) > MAX_NAME_LENGTH:
            return coded(
                WorldCode.INVALID_REQUEST,
                f"The {what} of a member may have at most {MAX_NAME_LENGTH} characters, not {len(text)}.",
            )
    return ""


def defect_of(message: pb.MemberMessage) -> str:
    """Why what a member says makes no sense in any world, or "". The coordinator goes through all that it names."""
    if (named := len(message.unconnected.ranks)) > MAX_SIZE:
        return f"A member can't fail to connect to {named} others."
    longest = max(len(message.unconnected.tried), len(message.leave.reason), len(message.leaving.reason))
    if longest > MAX_REASON_LENGTH:
        return f"A member's reason has {longest} characters; {MAX_REASON_LENGTH} are the most."
    return ""


def conflict_with(waiting: Waiting, request: pb.JoinRequest) -> str:
    """Why `request` can't be part of one world with the members that wait already, or "". Takes as long for many."""
    first = waiting.first
    if first is None:
        return ""
    if difference := _difference_of_releases(first.version, describe(first), request):
        return difference
    sizes = sizes_of(first)
    if (its := sizes_of(request)) != sizes:
        variables = "HOROVOD_MIN_SIZE and HOROVOD_MAX_SIZE" if its.is_elastic or sizes.is_elastic else "HOROVOD_SIZE"
        fixed = " always" if its.is_elastic != sizes.is_elastic and not sizes.is_elastic else ""
        return coded(
            WorldCode.MEMBERS_DISAGREE,
            f"{capitalized(describe(request))} expects {its} in job {request.job!r}, but "
            f"{describe(first)}{fixed} expects {sizes if its.is_elastic or sizes.is_elastic else sizes.most}; start "
            f"every process with the same {variables}.",
        )
    if len(waiting) >= sizes.most and not sizes.is_elastic:
        who = shortened([describe(member) for member in waiting.requests.values()], 4)
        return coded(
            WorldCode.TOO_MANY_MEMBERS,
            f"Job {request.job!r} already has its {plural(first.size, 'member')}: {who}. Start no more processes than "
            "HOROVOD_SIZE says, or give this job another name (HOROVOD_JOB).",
        )
    if request.HasField("requested_rank") != first.HasField("requested_rank") and not sizes.is_elastic:
        asks, does_not = (request, first) if request.HasField("requested_rank") else (first, request)
        return coded(
            WorldCode.INVALID_RANK,
            f"{capitalized(describe(asks))} asks for a rank, but {describe(does_not)} does not; either all members "
            "of a job do (HOROVOD_RANK, set by a launcher) or none.",
        )
    if request.HasField("requested_rank") and (other := waiting.by_rank.get(request.requested_rank)):
        return asked_for_twice(other, request)
    if difference := _difference_of_options(first.options, describe(first), request):
        return difference
    if len(waiting) >= MAX_SIZE or waiting.kept_bytes + request.ByteSize() > MAX_WAITING_BYTES:
        return coded(
            WorldCode.TOO_MANY_MEMBERS,
            f"{len(waiting)} processes of job {request.job!r} wait already; the coordinator keeps at most {MAX_SIZE} "
            f"of them, of {MAX_WAITING_BYTES >> 20} MiB together.",
        )
    if waiting.bytes + bytes_of(request) > MAX_WORLD_MESSAGE_BYTES // 2:
        return coded(
            WorldCode.WORLD_TOO_LARGE,
            f"The members of job {request.job!r} say more about themselves than one message holds: with "
            f"{describe(request)}, the addresses and names of {plural(len(waiting) + 1, 'member')} take more than "
            f"{MAX_WORLD_MESSAGE_BYTES >> 21} MiB. Name fewer interfaces with HOROVOD_NETWORK_INTERFACES.",
        )
    return ""


def asked_for_twice(one: pb.JoinRequest, other: pb.JoinRequest) -> str:
    return coded(
        WorldCode.INVALID_RANK,
        f"Rank {one.requested_rank} of job {other.job!r} is asked for twice, by {describe(one)} and by "
        f"{describe(other)}; give every process its own HOROVOD_RANK.",
    )


def conflict_with_world(world: pb.World, request: pb.JoinRequest) -> str:
    """Why `request` can't be taken in by the running world of an elastic job, or ""."""
    if difference := _difference_of_releases(world.version, f"world {world.epoch}", request):
        return difference
    its, sizes = sizes_of(request), sizes_of_world(world)
    if its != sizes:
        return coded(
            WorldCode.MEMBERS_DISAGREE,
            f"{capitalized(describe(request))} expects {its} in job {request.job!r}, which runs in world {world.epoch} "
            f"and has {sizes}; start every process with the same HOROVOD_MIN_SIZE and HOROVOD_MAX_SIZE, or give this "
            "job another name (HOROVOD_JOB).",
        )
    return _difference_of_options(world.options, f"world {world.epoch}", request)


def _difference_of_releases(version: str, who: str, request: pb.JoinRequest) -> str:
    """Ranks exchange tensors by what their own release does, which the next one may do in another way."""
    if request.version == version:
        return ""
    return coded(
        WorldCode.OTHER_VERSION,
        f"The members of job {request.job!r} must have the same release of Horovod, but {who} has "
        f"{release_in_words(version)} and {describe(request)} has {release_in_words(request.version)}. Install the "
        "same on every host, for the Python that runs the script.",
    )


def _difference_of_options(options: Mapping[str, str], who: str, request: pb.JoinRequest) -> str:
    for name in sorted({*options, *request.options}):
        theirs, ours = options.get(name), request.options.get(name)
        if theirs != ours:
            return coded(
                WorldCode.MEMBERS_DISAGREE,
                f"The members of job {request.job!r} must agree on {name}, but {who} has "
                f"{_option(theirs)} and {describe(request)} has {_option(ours)}.",
            )
    return ""


def describe(request: pb.JoinRequest) -> str:
    rank = request.requested_rank if request.HasField("requested_rank") else None
    return process_in_words(rank, request.pid, request.host.name)


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable()


def _option(value: str | None) -> str:
    return "no value for it" if value is None else repr(value)
