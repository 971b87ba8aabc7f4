import time

from serve_app.extension import Extension, OpenContext
from serve_app.extensions.page import cluster_status, web_pages
from serve_app.extensions.page.cluster_status import ClusterStatus, PageState, Recent


def open_page(context: OpenContext) -> PageState:
    if (node := context.node) is None:
        return PageState(context.dialects, None)
    recent = Recent(time.time, context.models)
    if node.replica:  # other processes do not install metrics
        recent.follow()
    node.share_note(recent.note)
    return PageState(context.dialects, ClusterStatus(recent, node.sizes, node.notes))


EXTENSION = Extension("page", dialects=(web_pages.DIALECT, cluster_status.DIALECT), open=open_page)
