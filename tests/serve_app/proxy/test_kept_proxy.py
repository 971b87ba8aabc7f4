"""What of Serve's class ours relies on; tests/faults/test_ends.py kills a real HAProxy."""

import inspect
import re

import ray
from ray.serve._private import controller, haproxy

from serve_app.cli import ray_settings
from serve_app.proxy.kept_proxy import KeptHAProxyManager


def test_the_controller_finds_its_class_where_ours_is_put() -> None:
    assert controller.HAProxyManager is haproxy.HAProxyManager
    assert ray_settings.LOCAL["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"] == "serve_app.proxy.kept_proxy.install"


def test_ray_takes_it_for_a_class_of_its_own() -> None:
    """A controller that finds such actors loads their class under the name and module that Ray noted with it."""
    descriptor = ray.remote(num_cpus=0)(KeptHAProxyManager).__ray_metadata__.actor_creation_function_descriptor
    assert (descriptor.module_name, descriptor.class_name) == ("serve_app.proxy.kept_proxy", "KeptHAProxyManager")


def test_serves_class_still_has_what_ours_needs() -> None:
    source = inspect.getsource(haproxy)
    for name in ("event_loop", "_haproxy_start_task", "_reload_lock", "_haproxy", "_proc", "backend_configs"):
        assert re.search(rf"self\.{name}\b.* = ", source), name
    for method in ("start", "_is_our_haproxy", "_generate_config_file_internal", "_start_and_wait_for_haproxy"):
        assert callable(getattr(haproxy.HAProxyApi, method))
    assert {"shutdown", "__init__"} <= {*vars(KeptHAProxyManager)}
