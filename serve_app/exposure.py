"""Whether a server may listen where it is told to."""

from ipaddress import ip_address

from serve_app.api_settings import AccessSettings, ApiSettings
from serve_app.start_error import StartError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str | None) -> bool:
    """Whether only this machine can reach a server that is bound to `host`; None is every address."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str | None, access: AccessSettings) -> None:
    """Raises StartError where others could speak without a key.

    The address that the server is bound to decides, never that of the peer: behind a proxy every client looks local.
    """
    if access.keys_file is None and not is_loopback(host):
        raise StartError(
            f"others can reach {host or 'every address'}, and no API keys are asked for: create one with "
            "`talkray key create NAME` and name its file in api.access.keys_file (`talkray serve --keys FILE`), "
            "or listen on 127.0.0.1"
        )


def for_host(settings: ApiSettings, host: str | None) -> ApiSettings:
    """The settings of a server bound to `host`: one without keys answers to loopback names only, unless told others.

    Raises StartError as `check_exposure` does.
    """
    access = settings.access
    check_exposure(host, access)
    if access.keys_file is None and access.allowed_hosts is None:
        names = tuple(dict.fromkeys((*LOOPBACK_HOSTS, str(host))))
        return settings.model_copy(update={"access": access.model_copy(update={"allowed_hosts": names})})
    return settings
