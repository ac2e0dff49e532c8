"""A TCP proxy that takes its time: what a client sends arrives later, in order. For a store that is slow."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType


class DelayingProxy:
    def __init__(self, address: str, delay_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server
        self.address = ""

    def __enter__(self) -> DelayingProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, there = await asyncio.open_connection(*self._target)
        except OSError:
            back.close()
            return
        sent: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            while data := await near.read(1 << 16):
                sent.put_nowait((self._loop.time() + self._delay_s, data))
            sent.put_nowait((0.0, b""))

        async def give() -> None:
            while True:
                due_s, data = await sent.get()
                if not data:
                    return
                await asyncio.sleep(due_s - self._loop.time())
                there.write(data)
                await there.drain()

        async def answer() -> None:
            while data := await far.read(1 << 16):
                back.write(data)
                await back.drain()

        tasks = [asyncio.ensure_future(one()) for one in (take, give, answer)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            back.close()
            there.close()
