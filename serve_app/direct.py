"""Requests to this machine, to our own nodes and to a cloud's metadata. Standard library only: all nodes use this."""

import http.client
import urllib.error
import urllib.request

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_direct(request: str | urllib.request.Request, *, timeout_s: float) -> http.client.HTTPResponse:
    """Like `urllib.request.urlopen`, but bypasses the proxies that the environment names.

    An HTTPError that it raises is closed: its body cannot be read.
    """
    try:
        answer: http.client.HTTPResponse = _OPENER.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()  # its traceback would keep the connection open until the garbage collector runs
        raise
    return answer
