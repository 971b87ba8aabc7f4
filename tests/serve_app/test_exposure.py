from pathlib import Path

import pytest

from serve_app import ingress
from serve_app.api_settings import AccessSettings, ApiSettings
from serve_app.exposure import check_exposure, for_host, is_loopback
from serve_app.ingress import Ingress
from serve_app.start_error import StartError

LOOPBACK = ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.10"]
OPEN = ["0.0.0.0", "::", "192.0.2.7", "tts.example.com", "", None]
WITH_KEYS = AccessSettings(keys_file=Path("keys.json"))


@pytest.mark.parametrize("host", LOOPBACK)
def test_keys_are_optional_on_a_loopback_address(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, AccessSettings())


@pytest.mark.parametrize("host", OPEN)
def test_others_need_keys(host: str | None) -> None:
    assert not is_loopback(host)
    with pytest.raises(StartError, match="talkray key create") as refused:
        check_exposure(host, AccessSettings())
    assert "--keys" in str(refused.value)
    check_exposure(host, WITH_KEYS)


def test_without_keys_only_loopback_names_are_answered_to() -> None:
    settings = for_host(ApiSettings(), "127.8.9.10")
    assert settings.access.allowed_hosts == ("localhost", "127.0.0.1", "::1", "127.8.9.10")


@pytest.mark.parametrize("access", [WITH_KEYS, AccessSettings(allowed_hosts=("tts.example.com",))])
def test_what_is_configured_stays(access: AccessSettings) -> None:
    settings = ApiSettings(access=access)
    assert for_host(settings, "127.0.0.1") == settings


@pytest.mark.parametrize("host", ["0.0.0.0", None])
def test_an_ingress_replica_asks_where_serve_listens(monkeypatch: pytest.MonkeyPatch, host: str | None) -> None:
    monkeypatch.setattr(ingress, "_bind_host", lambda: host)
    with pytest.raises(StartError):
        Ingress(ApiSettings(), codec=None)
