import time
from pathlib import Path
from typing import cast

from deployments.config import Strict
from serve_app.extension import Extension, OpenContext
from serve_app.extensions.access_tokens.signing import Secrets
from serve_app.extensions.access_tokens.token_routes import DIALECTS
from serve_app.extensions.access_tokens.tokens import AccessTokens
from serve_app.extensions.voices.library import Voices


class TokenSettings(Strict):
    """Settings of access tokens (docs/access-tokens.md)."""

    # File with the secrets that sign tokens, on all nodes with an ingress replica. The default is `token-secrets` next
    # to the key file. A server on one node creates this file.
    secrets_file: Path | None = None


def open_tokens(context: OpenContext) -> AccessTokens | None:
    """Open the access tokens, or return None without API keys. Raises StartError if `secrets_file` is not usable."""
    keys_file, file = context.settings.access.keys_file, context.settings.of(TokenSettings).secrets_file
    if keys_file is None:
        return None
    is_alone = context.node is None or context.node.num_nodes == 1
    keyring = Secrets(file or keys_file.with_name("token-secrets"), is_ours=file is None and is_alone)
    if file is not None:
        keyring.check()
    return AccessTokens(keyring, cast("Voices", context.opened["voices"]), time.time)


EXTENSION = Extension(
    "access_tokens", settings=TokenSettings, requires=("voices",), dialects=DIALECTS, open=open_tokens
)
