#!/bin/sh
# Make an audiobook with chapters, captions and uniform loudness. To resume after Ctrl-C, run the same command again. If
# you edit the text, only the changed paragraphs are synthesized again. Live requests have priority.
set -e
command -v talkray >/dev/null || PATH=$(cd "$(dirname "$0")" && pwd)/../../.venv/bin:$PATH
command -v talkray >/dev/null || { echo "talkray is missing: run \`make install\`, or put it on PATH" >&2; exit 1; }
cat > harbour.md <<'END'
# The Harbour

## The first ship

The ship came in at nine. Nobody had waited for it.

[Captain]: Where is everybody?

## The second ship

The second ship came in at noon, and the whole town was there.
END

talkray book harbour.md -o harbour.m4b --url "${TALKRAY_URL:-http://127.0.0.1:8000}" \
  --voice nora --voice-of Captain=felix --captions srt --loudness -18
