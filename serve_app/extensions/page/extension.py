import time

from serve_app.extension import Extension, Opening
from serve_app.extensions.page import cluster_status, web_pages
from serve_app.extensions.page.cluster_status import ClusterStatus, PageState, Recent


def open_page(opening: Opening) -> PageState:
    if (node := opening.node) is None:
        return PageState(opening.dialects, None)
    recent = Recent(time.time, opening.models)
    if node.replica:  # other processes do not install metrics
        recent.follow()
    node.share_note(recent.note)
    return PageState(opening.dialects, ClusterStatus(recent, node.sizes, node.notes))


EXTENSION = Extension("page", dialects=(web_pages.DIALECT, cluster_status.DIALECT), open=open_page)
