"""Ray reads its settings when the first test module imports it: all tests run under the tuned ones."""

from serve_app import ray_settings

ray_settings.apply_local()
