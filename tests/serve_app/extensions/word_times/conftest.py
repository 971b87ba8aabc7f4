from tests.serve_app.extensions.live.conftest import texts  # noqa: F401, a fixture
