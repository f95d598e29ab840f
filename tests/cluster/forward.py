#!/usr/bin/env python3
"""Connections to one address go to another: forward.py ADDRESS PORT ADDRESS PORT. Stands in for kube-proxy."""
import asyncio
import sys


async def pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def main():
    address, port, to, to_port = sys.argv[1:]

    async def serve(reader, writer):
        try:
            there = await asyncio.open_connection(to, int(to_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    server = await asyncio.start_server(serve, address, int(port))
    await server.serve_forever()


asyncio.run(main())
