from tests.serve_app.extensions.voices.conftest import client, folder  # noqa: F401, fixtures of both
