"""Ray reads its settings when the first test module imports it: all tests run under the tuned ones.

Some simulate a cluster: only `talkray serve` as a process of its own keeps to loopback addresses."""

from serve_app.cli import ray_settings

ray_settings.apply_local(several_nodes=True)

pytest_plugins = ["tests.e2e.black_box"]
