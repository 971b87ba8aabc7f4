from serve_app.extension import Extension
from serve_app.extensions.continuity.tails import ContinuitySettings, TailStore

EXTENSION = Extension(
    "continuity",
    settings=ContinuitySettings,
    requires=("word_times",),
    open=lambda context: TailStore(joins=context.settings.of(ContinuitySettings).joints),
)
