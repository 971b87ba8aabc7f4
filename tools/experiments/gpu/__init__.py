"""Ray reads its settings when it is imported: the commands here run under the tuned ones, as the tests do."""

from serve_app.cli import ray_settings

ray_settings.apply_local()
