from serve_app.extension import Extension
from serve_app.extensions.continuity.tails import ContinuitySettings, TailStore

EXTENSION = Extension(
    "continuity",
    settings=ContinuitySettings,
    requires=("word_times",),
    open=lambda opening: TailStore(joins=opening.settings.of(ContinuitySettings).joints),
)
