"""A text on its way from the ingress, to which the client writes, to the talker that speaks it.

Handles of Ray Serve cannot stream a request, so each talker reads by a TCP connection of its own. It sends the text's
token and the number of characters it has. It gets the rest in parts, each after its length, and an empty part at the
end. `MailboxServer` of the extension `live` keeps the text, so that another talker can read it again.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator

from deployments.errors import TalkerLost
from deployments.protocol import Mailbox

logger = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")  # of a part
_CONNECT_S = 2.0
_DELAYS_S = (0.05, 0.2, 1.0)  # before each further attempt; a received part resets them


async def read(mailbox: Mailbox) -> AsyncGenerator[str, None]:
    """The parts of a text as they are written, to its end. Reconnects if the connection breaks.

    Raises TalkerLost if the ingress cannot be reached, because another talker may reach it.
    """
    offset = 0
    delays = iter(_DELAYS_S)
    while True:
        try:
            async for part in _parts(mailbox, offset):
                if not part:
                    return
                offset += len(part)
                delays = iter(_DELAYS_S)
                yield part
            reason = "it was cut off"
        except (OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        delay_s = next(delays, None)
        if delay_s is None:
            raise TalkerLost(
                f"the text of this stream cannot be read from {mailbox.host}:{mailbox.port} ({reason}); hosts of the "
                "cluster have to reach each other on every port (cluster/kuberay/base/network-policy.yaml)"
            )
        logger.warning("text from %s:%d: %s", mailbox.host, mailbox.port, reason)
        await asyncio.sleep(delay_s)


async def _parts(mailbox: Mailbox, offset: int) -> AsyncGenerator[str, None]:
    """The parts that come by one connection. An empty part is the end of the text."""
    async with asyncio.timeout(_CONNECT_S):  # wait_for would lose a cancellation that comes with the connection
        reader, writer = await asyncio.open_connection(mailbox.host, mailbox.port)
    try:
        writer.write(f"{mailbox.token} {offset}\n".encode())
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                yield (await reader.readexactly(length)).decode()
            except asyncio.IncompleteReadError:
                return
    finally:
        writer.close()
