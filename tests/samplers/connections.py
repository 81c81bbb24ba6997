"""How servers of the tests end."""

from aiohttp import web


async def broken_off(runner: web.AppRunner) -> None:
    """Ends a server with all of its connections, as they end with a killed process."""
    assert runner.server is not None
    for connection in list(runner.server.connections):
        if connection.transport is not None:
            connection.transport.abort()
    await runner.cleanup()
