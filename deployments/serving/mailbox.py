"""Transfer of text from the ingress to a talker while the client is still writing it.

Ray Serve handles cannot stream requests, so each talker reads the text over its own TCP connection. The talker sends
the text's token and the number of characters that it already has. The ingress responds with the rest in parts, each
preceded by its length, and ends with an empty part. The ingress keeps the text in the
`MailboxServer` of the `live` extension, so that another talker can read it again.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator

from deployments.errors import TalkerLost
from deployments.protocol import Mailbox

logger = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")  # length of a part
_CONNECT_S = 2.0
_DELAYS_S = (0.05, 0.2, 1.0)  # delays before further attempts; they start over once a part is received


async def read(mailbox: Mailbox) -> AsyncGenerator[str, None]:
    """Yield the parts of a text as the client writes them, until the text ends. Reconnects if the connection breaks.

    Raises TalkerLost if the ingress is unreachable, because another talker may be able to reach it.
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
            reason = "the connection closed early"
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
    """Yield the parts that arrive over one connection. An empty part marks the end of the text."""
    async with asyncio.timeout(_CONNECT_S):  # wait_for would swallow a cancellation that coincides with the connect
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
