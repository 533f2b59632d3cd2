#!/bin/sh
# Take the picture of docs/guides/view.md: scripts/screenshot.sh RUN_DIR STEP TREE. Needs Chromium (apt-get install chromium).
set -eu
cd "$(dirname "$0")/.."
[ $# -eq 3 ] || { echo "usage: scripts/screenshot.sh RUN_DIR STEP TREE" >&2; exit 2; }
work=$(mktemp -d)
.venv/bin/arpo view "$1" --port 0 >"$work/address" &
server=$!
trap 'kill $server; rm -rf "$work"' EXIT
until [ -s "$work/address" ]; do kill -0 $server; sleep 0.2; done
chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
  --user-data-dir="$work/profile" --window-size=1180,860 --virtual-time-budget=12000 --screenshot="$work/page.png" \
  "$(cat "$work/address")#/trees/$(basename "$1")/$2/$3" 2>/dev/null
.venv/bin/python -c "
import sys
from PIL import Image
# Few colors make a small file; the right edge is the place of a scroll bar.
Image.open(sys.argv[1]).convert('RGB').crop((0, 0, 1166, 860)).quantize(256, dither=0).save('docs/images/view.png', optimize=True)
" "$work/page.png"
