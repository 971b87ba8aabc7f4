"""GPU experiments. Ray reads its settings at import, so the commands run with the tuned settings, as the tests do."""

from serve_app.cli import ray_settings

ray_settings.apply_local()
