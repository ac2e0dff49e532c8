"""Archives of code in the store, chunk by chunk, so that every coordinator of the store can serve them to agents."""

import asyncio
import hashlib
from collections.abc import Callable, Collection

import grpc

from horovod.base.errors import ClusterCode, coded
from horovod.coordinator.core.cluster.code import Archives, chunk_size, chunks_of, refusal_of
from horovod.coordinator.store import Guard, Store
from horovod.coordinator.store.records import archive_key, archive_value, chunk_key, read_archives
from horovod.protos.v1 import jobs_pb2 as pb

from .streams import RefusedError

INVALID = grpc.StatusCode.INVALID_ARGUMENT


class CodeShelf:
    """For the coordinator that serves agents and jobs. Methods raise StoreError."""

    def __init__(self, store: Store, guard: Callable[[], Guard | None], needed: Callable[[], Collection[str]]) -> None:
        """needed: the archives of jobs that are not over."""
        self.archives = Archives()
        self._store = store
        self._guard = guard
        self._needed = needed
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Reads which archives are in the store, and deletes incomplete ones, which their senders send again."""
        async with self._writing:  # a write that has begun before may end first
            self.archives = Archives()
            for name, (size, complete) in (await read_archives(self._store)).items():
                self.archives.add(pb.Code(sha256=name, size=size), complete=complete)
                if not complete:
                    await self._remove(name)

    def find(self, code: pb.Code) -> pb.CodeFound:
        """Which chunks of the archive this coordinator has. RefusedError where `code` can't name an archive."""
        if sentence := refusal_of(code):
            raise RefusedError(INVALID, sentence)
        if self.archives.has(code.sha256):
            self.archives.use(code.sha256)
        return self.archives.found(code.sha256, code.size)

    async def put(self, chunk: pb.CodeChunk) -> pb.CodeFound:
        """RefusedError with a sentence; nothing of an archive that is not what its name says stays."""
        code = chunk.code
        async with self._writing:
            found = self.find(code)
            if chunk.index not in found.missing:
                return found
            if len(chunk.data) != chunk_size(code.size, chunk.index):
                sentence = f"Chunk {chunk.index} of the code has a wrong length."
                raise RefusedError(INVALID, coded(ClusterCode.CODE_DAMAGED, sentence))
            if code.sha256 not in self.archives.known:
                await self._begin(code)
            archive = self.archives.known[code.sha256]
            if archive.size != code.size:
                sentence = "Another client sends code of that name with another length."
                raise RefusedError(INVALID, coded(ClusterCode.CODE_DAMAGED, sentence))
            await self._store.put(chunk_key(code.sha256, chunk.index), chunk.data, guard=self._guard())
            if archive.missing == {chunk.index}:
                await self._finish(code)
            archive.missing.discard(chunk.index)
            return self.find(code)

    async def get(self, name: str, index: int) -> bytes | None:
        """One chunk of an archive; None where it is not there."""
        if not self.archives.has(name):
            return None
        entry = await self._store.get(chunk_key(name, index))
        return None if entry is None else entry.value

    async def _begin(self, code: pb.Code) -> None:
        going = self.archives.in_the_way(code, self._needed())
        if isinstance(going, str):
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, going)
        for name in going:
            await self._remove(name)
        await self._store.put(archive_key(code.sha256), archive_value(code.size, complete=False), guard=self._guard())
        self.archives.add(code)

    async def _finish(self, code: pb.Code) -> None:
        digest = hashlib.sha256()
        for index in range(chunks_of(code.size)):
            entry = await self._store.get(chunk_key(code.sha256, index))
            if entry is not None:
                await asyncio.to_thread(digest.update, entry.value)
        if digest.hexdigest() != code.sha256:
            await self._remove(code.sha256)
            sentence = "The code is not what its name says: something on the way has changed it."
            raise RefusedError(INVALID, coded(ClusterCode.CODE_DAMAGED, sentence))
        await self._store.put(archive_key(code.sha256), archive_value(code.size, complete=True), guard=self._guard())

    async def _remove(self, name: str) -> None:
        """Deletes the archive: its chunks first, since chunks without the archive's own key would stay for ever."""
        archive = self.archives.known[name]
        archive.missing = set(range(chunks_of(archive.size)))
        for index in range(chunks_of(archive.size)):
            await self._store.delete(chunk_key(name, index), guard=self._guard())
        await self._store.delete(archive_key(name), guard=self._guard())
        self.archives.known.pop(name, None)
