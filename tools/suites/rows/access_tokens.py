"""Routes that issue access tokens."""

from tools.suites.row import Issuing, Rows

ISSUING = {
    "/v1/tokens": Issuing({"purpose": "socket"}, "token", "socket"),
    "/v1/realtime/client_secrets": Issuing({}, "value", "realtime"),
    "/openai/v1/realtime/client_secrets": Issuing({}, "value", "realtime"),
    "/v1/single-use-token/tts_websocket": Issuing({}, "token", "tts_websocket"),
    "/v1/auth/grant": Issuing({}, "access_token", "deepgram"),
    "/access-token": Issuing({"grants": {"tts": True}}, "token", "cartesia"),
}
ROWS = Rows(issuing=ISSUING)
