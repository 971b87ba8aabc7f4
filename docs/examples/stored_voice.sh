#!/bin/sh
# Store a recorded voice under a name that all clients can use: sh stored_voice.sh ada.wav "What it says."
# This requires a Base checkpoint (talkray serve --model 1.7B-Base) and the speaker's consent.
set -e
url=${TALKRAY_URL:-http://127.0.0.1:8000} key=${TALKRAY_API_KEY:-none}
ask() { curl --fail-with-body -sS -H "Authorization: Bearer $key" "$@"; }
answers() { curl -s -o /dev/null "$url/health"; }
answers || { echo "$url does not respond. Start \`talkray serve\`, or set TALKRAY_URL" >&2; exit 1; }
[ -f "$1" ] && [ -n "$2" ] || { echo 'usage: sh stored_voice.sh RECORDING.wav "What it says."' >&2; exit 2; }

# Store the voice once. The response lists changes made to the recording, and advice on how to make a better one.
ask "$url/v1/audio/voices" -F name=ada -F audio_sample=@"$1" -F ref_text="$2" -F consent="agreed in writing"
echo

# Use the voice by name. This also works in the dialects of other services.
ask "$url/v1/audio/speech" -H 'Content-Type: application/json' -o ada.mp3 \
  -d '{"model": "qwen3-tts", "voice": "ada", "input": "Good evening. This is my voice.", "response_format": "mp3"}'

# Export the voice to a file that other servers can import, then delete the voice.
ask "$url/v1/audio/voices/ada/file" -o ada.voice
ask -X DELETE "$url/v1/audio/voices/ada"
echo
