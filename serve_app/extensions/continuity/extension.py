from serve_app.extension import Extension
from serve_app.extensions.continuity.joints import ContinuitySettings, Tails

EXTENSION = Extension(
    "continuity",
    settings=ContinuitySettings,
    requires=("word_times",),
    open=lambda opening: Tails(joins=opening.settings.of(ContinuitySettings).joints),
)
