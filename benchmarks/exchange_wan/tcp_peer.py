"""One peer of the `tcp` rows: sends as many bytes as an update has to each other, over connections that stay open.

    python -m benchmarks.exchange_wan.tcp_peer JOB.json NUMBER

It shows TCP's own cost beyond the floor: slow start after every pause, and headers.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from benchmarks.exchange_wan.job import LOOK_SECONDS, Diary, Job
from benchmarks.exchange_wan.setting import Setting
from protocol.codec import make_codec
from protocol.spec import CodecSpec

PORT = 7420


async def serve(job: Job, number: int) -> None:
    """Run rounds until there are no more."""
    diary, n = Diary(job, number), len(job.ips)
    layout = Setting(job.parameters, n).layout
    size = make_codec(CodecSpec.model_validate(job.codec), layout).size
    came: dict[int, asyncio.StreamReader] = {}
    all_here = asyncio.Event()

    async def take(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        came[(await reader.readexactly(1))[0]] = reader
        if len(came) == n - 1:
            all_here.set()

    server = await asyncio.start_server(take, job.ips[number], PORT, limit=2**20)
    writers = []
    for other, ip in enumerate(job.ips):
        if other != number:
            writers.append(await _dial(ip, number))
    await asyncio.wait_for(all_here.wait(), 60)
    blob, number_of_round = bytes(size), 0
    while True:
        diary.ready(number_of_round)
        while (at := diary.begins(number_of_round)) is None:
            if diary.over:
                server.close()
                return
            await asyncio.sleep(LOOK_SECONDS)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, at - loop.time()))
        diary.say("announced", number_of_round)
        for writer in writers:
            writer.write(blob)
        await asyncio.gather(*(_read(r, size) for r in came.values()), *(w.drain() for w in writers))
        diary.say("done", number_of_round, shares={"all": 1.0, "survivors": 0.0}, taking_part=n)
        number_of_round += 1


async def _read(reader: asyncio.StreamReader, size: int) -> None:
    while size:
        data = await reader.read(min(size, 2**18))
        if not data:
            raise ConnectionError("the other end is gone")
        size -= len(data)


async def _dial(ip: str, number: int) -> asyncio.StreamWriter:
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection(ip, PORT)
            writer.write(bytes([number]))
            return writer
        except OSError:
            await asyncio.sleep(0.1)
    raise ConnectionError(f"{ip} does not answer")


if __name__ == "__main__":
    asyncio.run(serve(Job.read(Path(sys.argv[1])), int(sys.argv[2])))
