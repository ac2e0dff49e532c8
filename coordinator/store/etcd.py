"""A store in etcd: it outlives its coordinators, and any number of them share it.

The store's revision is etcd's. A watch that lost its connection goes on, at whichever endpoint answers, where it was.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence

from horovod.protos.etcd import etcd_pb2 as pb

from .base import MISSING, Change, CompactedError, Entry, FencedError, Guard, LeaseLostError, check_size
from .etcd_address import EtcdAddress
from .etcd_client import CALL_S, EtcdClient

PAGE_ENTRIES = 32  # entries in one page of a range: at most 48 MB


class EtcdStore:
    """Belongs to one event loop; connects with its first call.

    call_s: how long a call may take, with attempts at all endpoints.
    """

    is_shared = True

    def __init__(self, address: EtcdAddress, call_s: float = CALL_S) -> None:
        self._client = EtcdClient(address, call_s)
        self._prefix = address.prefix

    async def get(self, key: str) -> Entry | None:
        found = await self._range(pb.RangeRequest(key=self._key(key)))
        return self._entry(found.kvs[0]) if found.kvs else None

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        """Reads page by page, so that each answer is short enough for the time limit of a call."""
        start = self._key(prefix)
        request = pb.RangeRequest(key=start, range_end=_after(start), limit=PAGE_ENTRIES)
        entries: list[Entry] = []
        while True:
            found = await self._range(request)
            entries += [self._entry(pair) for pair in found.kvs]
            request.revision = request.revision or found.header.revision
            if not found.more:
                return entries, request.revision
            request.key = found.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        check_size(key, value)
        request = pb.PutRequest(key=self._key(key), value=value, lease=lease or 0)
        if guard is not None:
            answer = await self._write_if([], pb.RequestOp(request_put=request), guard)
            return Entry(key, value, answer.header.revision)
        done = await self._client.write("/etcdserverpb.KV/Put", request, pb.PutResponse)
        return Entry(key, value, done.header.revision)

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        check_size(key, value)
        put = pb.PutRequest(key=self._key(key), value=value, lease=lease or 0)
        answer = await self._write_if([Guard(key, revision)], pb.RequestOp(request_put=put), guard)
        return Entry(key, value, answer.header.revision) if answer.succeeded else None

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        request = pb.DeleteRangeRequest(key=self._key(key))
        if revision is None and guard is None:
            gone = await self._client.write("/etcdserverpb.KV/DeleteRange", request, pb.DeleteRangeResponse)
            return gone.deleted > 0
        if revision == 0:  # the condition is that the key does not exist
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
        start = self._key(prefix)
        following = revision
        while True:
            request = pb.WatchCreateRequest(key=start, range_end=_after(start), start_revision=following)
            async for response in self._client.watch(request):
                if response.compact_revision:
                    raise CompactedError(
                        f"Changes before revision {response.compact_revision} are gone, but {following} was asked for."
                    )
                changes = [self._change(event) for event in response.events]
                if changes:  # changes of one revision come in one response
                    following = changes[-1].revision + 1
                for change in changes:
                    yield change

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

    def _entry(self, pair: pb.KeyValue) -> Entry:
        return Entry(pair.key.decode().removeprefix(self._prefix), pair.value, pair.mod_revision)

    def _change(self, event: pb.Event) -> Change:
        entry = self._entry(event.kv)
        return Change(entry.key, entry.value if event.type == pb.Event.PUT else None, entry.revision)


def _after(prefix: bytes) -> bytes:
    """The first key behind all keys that begin with `prefix`; it is UTF-8, so no byte of it is 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
