#!/usr/bin/env bash
# `make image`: build the image of a job from requirements.lock, and check it.
#
#   build.sh [--tag NAME] [--sqsh FILE]
#
# --sqsh also writes the image for pyxis (`container:` of a cluster profile); that needs enroot. DOCKER=podman builds with
# podman, BASE=IMAGE on another base. With a GPU here, the check sees it too.
set -euo pipefail
cd "$(dirname "$0")/../.."
TAG=arpo-megatron:0.1.0 SQSH=
DOCKER=${DOCKER:-docker}
fail() { printf 'image: %s\n' "$*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --tag) TAG=${2:?a name} ;;
    --sqsh) SQSH=$(realpath -m "${2:?a file}") ;;
    *) fail "unknown argument $1; usage: build.sh [--tag NAME] [--sqsh FILE]" ;;
  esac
  shift 2
done
command -v "$DOCKER" >/dev/null || fail "$DOCKER is not installed: install docker or podman, or set DOCKER"
[ -z "$SQSH" ] || command -v enroot >/dev/null || fail "enroot is not installed here: leave out --sqsh, and import $TAG where it is"
[ -z "$SQSH" ] || [ ! -e "$SQSH" ] || fail "$SQSH exists already: remove it, or name another file"

"$DOCKER" build --file slurm/container/Dockerfile --tag "$TAG" ${BASE:+--build-arg "BASE=$BASE"} .
gpus=()
! command -v nvidia-smi >/dev/null || gpus=(--gpus all)
"$DOCKER" run --rm "${gpus[@]}" --volume "$PWD:/code:ro" --workdir /code "$TAG" python -m arpo_megatron.launch.preflight.image ||
  fail "$TAG is built, but its check failed"
[ -z "$SQSH" ] || case $DOCKER in
  *podman) enroot import --output "$SQSH" "podman://$TAG" ;;
  *) enroot import --output "$SQSH" "dockerd://$TAG" ;;
esac
printf 'image: %s is ready%s\n' "$TAG" "${SQSH:+; container: $SQSH}"
