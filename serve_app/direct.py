"""HTTP requests to this machine, other Talkray nodes and cloud metadata servers. Uses only the standard library,
because all nodes need it.
"""

import http.client
import urllib.error
import urllib.request

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_direct(request: str | urllib.request.Request, *, timeout_s: float) -> http.client.HTTPResponse:
    """Open a URL like `urllib.request.urlopen`, but ignore proxy settings in the environment.

    A raised HTTPError has been closed, so its body cannot be read.
    """
    try:
        answer: http.client.HTTPResponse = _OPENER.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()  # its traceback would keep the connection open until the garbage collector runs
        raise
    return answer
