"""A store in etcd: it outlives its coordinators, and any number of them share it.

The store's revision is etcd's. A watch that lost its connection goes on, at whichever endpoint answers, where it was.

With a seal (seal.py), an entry that no coordinator with such a key has written counts as not there: it is left out of
ranges, `get` returns None, a watch sees a deletion, and `put_if` with MISSING writes over it. So nothing of it is run,
what is else in the store goes on, and who held that key finds out as if it was deleted. The log names it.

Whether the key is the right one must not be told from such an entry, which anybody can write: a coordinator with a
wrong key would take every job for tampered, and the agents would end them. So there is an entry whose seal tells
(`SEALED`). While that does not open, each call raises StoreKeyError.

Another entry says in which format coordinators write here, and which release wrote that (`FORMAT`). Where it is not
ours, each call raises StoreFormatError.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Sequence

from horovod.base.errors import ClusterCode, coded
from horovod.base.protocol import STORE_FORMAT, __version__
from horovod.base.words import printable, release_in_words
from horovod.protos.etcd import etcd_pb2 as pb

from .base import (
    MISSING,
    Change,
    CompactedError,
    Entry,
    FencedError,
    Guard,
    LeaseLostError,
    StoreError,
    StoreFormatError,
    StoreKeyError,
    WritesRefusedError,
    check_size,
)
from .etcd_address import EtcdAddress
from .etcd_client import CALL_S, EtcdClient
from .seal import BOUND, NO_PLACE, Place, Seal, UnsealedError, is_sealed

PAGE_ENTRIES = 32  # entries in one page of a range: at most 48 MB
SEALED = "sealed"  # the key of an entry, empty and sealed, by which coordinators know that they have the right key
FORMAT = "format"  # the key of an entry, never sealed, with STORE_FORMAT and the release that wrote it
_OUR_FORMAT = f"{STORE_FORMAT} {__version__}".encode()
_BLANK = Place(0, 1)  # value of an entry in BOUND that was created, and gets its own value with the next write
_ATTEMPTS = 10  # attempts to write an entry in BOUND, which others write at the same time
_MAX_TOLD = 1000  # refused entries that the log names

_log = logging.getLogger(__name__)


class EtcdStore:
    """Belongs to one event loop; connects with its first call.

    call_s: how long a call may take, with attempts at all endpoints.
    seal: of all values; None: they stand there as they are.
    """

    is_shared = True

    def __init__(self, address: EtcdAddress, call_s: float = CALL_S, seal: Seal | None = None) -> None:
        self._client = EtcdClient(address, call_s)
        self._name = "etcd at " + ", ".join(address.endpoints)
        self._prefix = address.prefix
        self._seal = seal
        self._is_checked = False
        self._told: dict[str, int] = {}  # key -> the revision of an entry that was refused, which the log has named

    async def get(self, key: str) -> Entry | None:
        await self._check_once()
        found = await self._opened(await self._pairs(key))
        return found[0] if found else None

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        """Reads page by page, so that each answer is short enough for the time limit of a call."""
        await self._check_once()
        start = self._key(prefix)
        request = pb.RangeRequest(key=start, range_end=_after(start), limit=PAGE_ENTRIES)
        entries: list[Entry] = []
        while True:
            found = await self._range(request)
            entries += await self._opened(found.kvs)
            request.revision = request.revision or found.header.revision
            if not found.more:
                return entries, request.revision
            request.key = found.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        check_size(key, value)
        await self._check_once()
        if self._is_bound(key):
            for _ in range(_ATTEMPTS):
                if entry := await self._put_bound(key, value, None, lease, guard):
                    return entry
            raise StoreError(f"{self._name} has another client that writes {key} again and again.")
        request = self._put_request(key, value, lease)
        if guard is not None:
            answer = await self._write_if([], pb.RequestOp(request_put=request), guard)
            return Entry(key, value, answer.header.revision)
        done = await self._client.write("/etcdserverpb.KV/Put", request, pb.PutResponse)
        return Entry(key, value, done.header.revision)

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        check_size(key, value)
        await self._check_once()
        if self._is_bound(key):
            return await self._put_bound(key, value, revision, lease, guard)
        put = pb.RequestOp(request_put=self._put_request(key, value, lease))
        answer = await self._write_if([Guard(key, revision)], put, guard)
        if not answer.succeeded and revision == MISSING and self._seal is not None:
            pairs = await self._pairs(key)
            if not pairs or await self._opened(pairs):
                return None
            answer = await self._write_if([Guard(key, pairs[0].mod_revision)], put, guard)
        return Entry(key, value, answer.header.revision) if answer.succeeded else None

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        request = pb.DeleteRangeRequest(key=self._key(key))
        if revision is None and guard is None:
            gone = await self._client.write("/etcdserverpb.KV/DeleteRange", request, pb.DeleteRangeResponse)
            return gone.deleted > 0
        if revision == 0:  # revision 0: the condition is that the key does not exist
            return False
        latest = [] if revision is None else [Guard(key, revision)]
        answer = await self._write_if(latest, pb.RequestOp(request_delete_range=request), guard)
        return answer.succeeded and answer.responses[0].response_delete_range.deleted > 0

    async def grant(self, ttl_s: float) -> int:
        request = pb.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        # If the answer is lost, no process keeps the lease alive, and it expires by itself.
        return (await self._client.ask("/etcdserverpb.Lease/LeaseGrant", request, pb.LeaseGrantResponse)).ID

    async def keep_alive(self, lease: int) -> None:
        if await self._client.keep_alive(lease) <= 0:
            raise LeaseLostError("The lease has ended or never was.")

    async def revoke(self, lease: int) -> None:
        try:
            request = pb.LeaseRevokeRequest(ID=lease)
            await self._client.ask("/etcdserverpb.Lease/LeaseRevoke", request, pb.LeaseRevokeResponse)
        except LeaseLostError:
            pass

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        await self._check_once()
        start = self._key(prefix)
        following = revision
        while True:
            request = pb.WatchCreateRequest(key=start, range_end=_after(start), start_revision=following)
            async for response in self._client.watch(request):
                if response.compact_revision:
                    raise CompactedError(
                        f"Changes before revision {response.compact_revision} are gone, but {following} was asked for."
                    )
                for event in response.events:
                    change = await self._change(event)
                    if change is not None:
                        yield change
                if response.events:  # changes of one revision come in one response
                    following = response.events[-1].kv.mod_revision + 1

    async def close(self) -> None:
        await self._client.close()

    # -- inside --------------------------------------------------------------------------------------------------------
    async def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        return await self._client.ask("/etcdserverpb.KV/Range", request, pb.RangeResponse)

    async def _write_if(self, conditions: list[Guard], write: pb.RequestOp, guard: Guard | None) -> pb.TxnResponse:
        """Raises FencedError when it was the guard that did not hold."""
        request = pb.TxnRequest(success=[write])
        for one in conditions if guard is None else [*conditions, guard]:
            request.compare.add(
                result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=self._key(one.key), mod_revision=one.revision
            )
        if guard is not None:
            request.failure.add(request_range=pb.RangeRequest(key=self._key(guard.key)))
        answer = await self._client.write("/etcdserverpb.KV/Txn", request, pb.TxnResponse)
        if guard is not None and not answer.succeeded:
            found = answer.responses[0].response_range.kvs
            if (found[0].mod_revision if found else MISSING) != guard.revision:
                raise FencedError(f"{guard.key} is not as it was at revision {guard.revision} any more.")
        return answer

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _name_of(self, pair: pb.KeyValue) -> str:
        return pair.key.decode(errors="backslashreplace").removeprefix(self._prefix)

    async def _pairs(self, key: str) -> Sequence[pb.KeyValue]:
        """One or none."""
        return (await self._range(pb.RangeRequest(key=self._key(key)))).kvs

    def _put_request(self, key: str, value: bytes, lease: int | None, place: Place = NO_PLACE) -> pb.PutRequest:
        if self._seal is not None:
            value = self._seal.close(self._prefix + key, value, place)
        return pb.PutRequest(key=self._key(key), value=value, lease=lease or 0)

    async def _change(self, event: pb.Event) -> Change | None:
        """None if nobody is to hear of it."""
        key, revision = self._name_of(event.kv), event.kv.mod_revision
        if key == FORMAT or (self._seal is not None and key == SEALED):
            return None
        if event.type != pb.Event.PUT:
            return Change(key, None, revision)
        found = await self._opened([event.kv])
        if not found and self._is_bound(key) and event.kv.version == 1:
            return None
        return Change(key, found[0].value if found else None, revision)

    # -- the seal ----------------------------------------------------------------------------------------------------
    def _is_bound(self, key: str) -> bool:
        return self._seal is not None and key.startswith(BOUND)

    async def _put_bound(
        self, key: str, value: bytes, revision: int | None, lease: int | None, guard: Guard | None
    ) -> Entry | None:
        """As `put_if`; revision: None: any. The value names its place, which no other client can have written to.

        An entry that is not there is created empty, since only then its place is known. One that stays so, because this
        coordinator ends in between, counts as not there.
        """
        pairs = await self._pairs(key)
        if revision is not None:
            there = await self._opened(pairs)
            if (there[0].revision if there else MISSING) != revision:
                if guard is not None:  # nothing is written; the question is whether the guard holds
                    look = pb.RequestOp(request_range=pb.RangeRequest(key=self._key(guard.key)))
                    await self._write_if([], look, guard)
                return None
        if pairs:
            place, latest = Place(pairs[0].create_revision, pairs[0].version + 1), pairs[0].mod_revision
        else:
            blank = pb.RequestOp(request_put=self._put_request(key, b"", lease, _BLANK))
            answer = await self._write_if([Guard(key, MISSING)], blank, guard)
            if not answer.succeeded:
                return None
            latest = answer.header.revision
            place = Place(latest, 2)
        put = pb.RequestOp(request_put=self._put_request(key, value, lease, place))
        answer = await self._write_if([Guard(key, latest)], put, guard)
        return Entry(key, value, answer.header.revision) if answer.succeeded else None

    async def _opened(self, pairs: Sequence[pb.KeyValue]) -> list[Entry]:
        """Those that count as there. Raises StoreKeyError if it is this coordinator's key that is wrong."""
        entries, refused = [], []
        for pair in pairs:
            key = self._name_of(pair)
            try:
                value = self._value_of(key, pair)
            except UnsealedError as error:
                refused.append((key, pair.mod_revision, str(error)))
                continue
            if value is not None:
                entries.append(Entry(key, value, pair.mod_revision))
        if refused:
            await self._check_key()
        for key, revision, why in refused:
            self._refuse(key, revision, why)
        return entries

    def _value_of(self, key: str, pair: pb.KeyValue) -> bytes | None:
        """None if it counts as not there for a reason of our own. Raises UnsealedError."""
        if key == FORMAT:
            return None
        if self._seal is None:
            if is_sealed(pair.value):
                raise StoreKeyError(
                    f"{self._name} has entries that other coordinators have encrypted, and this one has no "
                    "key. Start it with their --token-file or --store-key-file."
                )
            return pair.value
        if key == SEALED:
            return None
        place = Place(pair.create_revision, pair.version) if self._is_bound(key) else NO_PLACE
        is_blank = place.version == _BLANK.version
        value = self._seal.open(self._prefix + key, pair.value, _BLANK if is_blank else place)
        return None if is_blank else value

    def _refuse(self, key: str, revision: int, why: str) -> None:
        if self._told.get(key) == revision:
            return
        if len(self._told) >= _MAX_TOLD:
            self._told.clear()
        self._told[key] = revision
        sentence = (
            f"{self._name} holds {printable(self._prefix + key)}, which no coordinator has written as it stands there: "
            f"{why}. It counts as not there, and nothing of it is run. See who else may write to this etcd (`etcdctl "
            "user list`, --client-cert-auth), then submit again the job that is missing."
        )
        _log.error("%s", coded(ClusterCode.STORE_TAMPERED, sentence))

    async def _check_once(self) -> None:
        if not self._is_checked:
            await self._check_key()
            await self._check_format()
            self._is_checked = True

    async def _check_format(self) -> None:
        """Raises StoreFormatError unless coordinators write here as this one does."""
        pairs = await self._pairs(FORMAT)
        if not pairs:  # releases before 1.0.0 wrote no entry; theirs is the first format
            put = pb.RequestOp(request_put=pb.PutRequest(key=self._key(FORMAT), value=_OUR_FORMAT))
            # Where no room is left, what stands there can still be read. Another coordinator may have been faster.
            with contextlib.suppress(WritesRefusedError):
                if (await self._write_if([Guard(FORMAT, MISSING)], put, None)).succeeded:
                    return
            pairs = await self._pairs(FORMAT)
        found = pairs[0].value if pairs else _OUR_FORMAT
        number, _, release = found.decode(errors="replace").partition(" ")
        if number != str(STORE_FORMAT):
            raise StoreFormatError(
                f"{self._name} holds what coordinators of {release_in_words(release)} have written under "
                f"{self._prefix!r} (format {printable(number, 20)}), but Horovod {__version__} has format "
                f"{STORE_FORMAT}. Go back to that release until their jobs have ended, then choose another prefix for "
                "this one (--store etcd://...?prefix=TEXT)."
            )

    async def _check_key(self) -> None:
        """Raises StoreKeyError unless the store is sealed with a key that is here. An empty one is sealed now."""
        seal = self._seal
        if seal is None:
            return
        key = self._prefix + SEALED
        pairs = await self._pairs(SEALED)
        if pairs:
            try:
                seal.open(key, pairs[0].value)
            except UnsealedError as error:
                raise StoreKeyError(
                    f"{self._name} was sealed by coordinators with another key ({key!r}: {error}). Give this one the "
                    "same --token-file, or the same --store-key-file. If that is so already, somebody else has written "
                    f"this entry: `etcdctl del {key}`."
                ) from None
            if seal.is_latest(pairs[0].value):
                return
        else:
            start = self._key("")
            found = await self._range(pb.RangeRequest(key=start, range_end=_after(start), limit=PAGE_ENTRIES))
            entries = [pair for pair in found.kvs if self._name_of(pair) != FORMAT]
            if entries and not any(self._opens(pair) for pair in entries):
                raise StoreKeyError(
                    f"{self._name} holds what coordinators have written under {self._prefix!r} without a key, "
                    "or with another one, so that it is not known who wrote it. Let their jobs end, stop "
                    f"these coordinators, and delete the entries: `etcdctl del --prefix {self._prefix}`; or "
                    "choose another prefix (--store etcd://...?prefix=TEXT)."
                )
        latest = pairs[0].mod_revision if pairs else MISSING
        put = pb.RequestOp(request_put=self._put_request(SEALED, b"", None))
        await self._write_if([Guard(SEALED, latest)], put, None)  # if another coordinator was faster, its entry will do

    def _opens(self, pair: pb.KeyValue) -> bool:
        try:
            self._value_of(self._name_of(pair), pair)
        except UnsealedError:
            return False
        return True


def _after(prefix: bytes) -> bytes:
    """The first key behind all keys that begin with `prefix`; it is UTF-8, so no byte of it is 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
