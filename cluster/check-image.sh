#!/usr/bin/env bash
# Start an image built by buildah under the limits of a cluster: as an arbitrary user, on a read-only root, with 64 MiB
# of /dev/shm and without a network. It must speak, stop within five seconds, hold no CUDA, and unpack to 2.0 GB at most.
#   sudo cluster/check-image.sh talkray:1.0.0rc1-cpu      # BUILDAH names another command, such as "buildah --root DIR"
#
# Run as root to build the image without Docker or a registry, from Debian's packages and torch for CPUs in wheels/:
#   apt-get install buildah mmdebstrap
#   mkdir base && mmdebstrap --variant=minbase --include=ca-certificates,python3,python3-venv,rsync,procps bookworm base/rootfs.tar
#   printf 'FROM scratch\nADD rootfs.tar /\n' > base/Dockerfile
#   echo '{"default":[{"type":"insecureAcceptAnything"}]}' > p.json
#   export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
#   buildah bud --signature-policy p.json -t localhost/base base
#   buildah bud --signature-policy p.json --format docker -f cluster/Dockerfile --target cpu --build-arg BASE=localhost/base \
#     --volume $PWD/wheels:/wheels:ro --build-arg PIP_OPTIONS="--find-links /wheels" -t talkray:1.0.0rc1-cpu .
set -euo pipefail
image=$1 user=12345
read -ra buildah <<<"${BUILDAH:-buildah}"
work=$(mktemp -d)
container=$("${buildah[@]}" from --pull-never "$image")
trap '[ -z "${server:-}" ] || kill -KILL "$server" 2>/dev/null || true; "${buildah[@]}" rm "$container" >/dev/null; rm -rf "$work"' EXIT
root=$("${buildah[@]}" mount "$container")

megabytes=$(du -s --block-size=MB "$root" | cut -f1)
cuda=$(find "$root" \( -name 'libcud*.so*' -o -name 'libcublas*.so*' -o -path '*/nvidia/*.so*' \) | head -3)
echo "$megabytes unpacked; CUDA: ${cuda:-none}"
[ "${megabytes%MB}" -le 2000 ] && [ -z "$cuda" ]

# The image's own environment and command, with keys in the format of `talkray key create`.
"${buildah[@]}" inspect --type image "$image" |
  python3 -c 'import json, sys; config = json.load(sys.stdin)["OCIv1"]["config"]; print(*config["Env"], *config["Cmd"], sep="\n")' >"$work/command"
mapfile -t command <"$work/command"
mkdir "$work/keys"
key=$(chroot "$root" /opt/talkray/bin/talkray key create check --file /tmp/keys.json | grep -o "talkray-[^ ]*" | head -1)
mv "$root/tmp/keys.json" "$work/keys/"
chmod -R a+rX "$work"

unshare --mount --pid --fork --net --mount-proc --kill-child bash -ec '
  root=$1 keys=$2 user=$3; shift 3
  ip link set lo up
  mount --make-rprivate / && mount --bind "$root" "$root" && mount -o remount,ro,bind "$root"
  mount -t proc proc "$root/proc"
  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  for device in null zero random urandom full tty; do touch "$root/dev/$device"; mount --bind /dev/$device "$root/dev/$device"; done
  ln -s /proc/self/fd "$root/dev/fd"
  mkdir "$root/dev/shm" && mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  mount -t tmpfs -o mode=700,uid=$user,gid=$user tmpfs "$root/var/lib/talkray"
  mount --bind "$keys" "$root/etc/talkray"
  cd "$root" && exec chroot --userspec=$user:$user "$root" /usr/bin/env -i "$@"
' _ "$root" "$work/keys" "$user" "${command[@]}" >"$work/log" 2>&1 &
server=$!
until grep -q 'Press Ctrl-C to stop.' "$work/log"; do
  { kill -0 "$server" && [ "$SECONDS" -lt 900 ]; } || { cat "$work/log"; exit 1; }
  sleep 1
done
inside=$(pgrep --parent "$server" | head -1)
status=$(nsenter --target "$inside" --net curl --silent --max-time 60 http://127.0.0.1:8000/v1/audio/speech -H "Authorization: Bearer $key" \
  -H 'Content-Type: application/json' -d '{"model": "qwen3-tts", "input": "Hello.", "voice": "alloy"}' -o "$work/hello.mp3" -w '%{http_code}')
echo "user $(awk '/^Uid/ {print $2}' "/proc/$inside/status"): status $status, $(stat -c %s "$work/hello.mp3") bytes of speech"
[ "$status" = 200 ]
sleep 5 # streams have ended
began=$(date +%s%N)
kill -TERM "$inside"
wait "$server" || true
took=$((($(date +%s%N) - began) / 1000000))
echo "stopped after $took ms"
[ "$took" -le 5000 ]
