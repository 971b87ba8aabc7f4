#!/bin/sh
# Many texts at once by OpenAI's batches: they are spoken beside live requests, behind them, and survive a restart.
set -e
url=${TALKRAY_URL:-http://127.0.0.1:8000} key=${TALKRAY_API_KEY:-none}
ask() { curl --fail-with-body -sS -H "Authorization: Bearer $key" "$@"; }
field() { python3 -c "import json, sys; told = json.load(sys.stdin); print(told.get('$1') or sys.exit(f'no $1: {told}'))"; }
answers() { curl -s -o /dev/null "$url/health"; }
answers || { echo "$url does not answer: start \`talkray serve\`, or set TALKRAY_URL" >&2; exit 1; }

cat > texts.jsonl <<'END'
{"custom_id": "open", "method": "POST", "url": "/v1/audio/speech", "body": {"input": "We are open until five.", "voice": "nora"}}
{"custom_id": "closed", "method": "POST", "url": "/v1/audio/speech", "body": {"input": "We are closed today.", "voice": "felix"}}
END

file=$(ask "$url/v1/files" -F purpose=batch -F file=@texts.jsonl | field id)
batch=$(ask "$url/v1/batches" -H 'Content-Type: application/json' \
  -d "{\"input_file_id\": \"$file\", \"endpoint\": \"/v1/audio/speech\", \"completion_window\": \"24h\"}" | field id)

while status=$(ask "$url/v1/batches/$batch" | field status); [ "$status" = in_progress ] || [ "$status" = validating ]; do
  sleep 1
done
echo "$batch: $status"
[ "$status" = completed ] || { ask "$url/v1/batches/$batch"; exit 1; }

# Each line of the output has the audio of one text, in base64.
ask "$url/v1/files/$(ask "$url/v1/batches/$batch" | field output_file_id)/content" | python3 -c '
import base64, json, sys
for line in map(json.loads, sys.stdin):
    with open(line["custom_id"] + ".mp3", "wb") as file:
        file.write(base64.b64decode(line["response"]["body"]["audio"]))
    print(file.name)
'
