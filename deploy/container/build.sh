#!/usr/bin/env bash
# Builds the image and prints its size: build.sh [--target cpu|cuda] [--tag NAME] [--engine docker|podman|buildah]
#                                                [-- ARGUMENTS OF THE ENGINE]
#
#   deploy/container/build.sh
#   deploy/container/build.sh --target cuda -- --build-arg=TOOLKIT=my/image-with-cuda
#
# cuda takes its compiler from NVIDIA's image unless told otherwise. The engine is the first of the three that is
# installed. The default tag is the one that deploy/kubernetes names.
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/../.."

target=cpu tag='' engine=''
while [ $# -gt 0 ]; do
  case $1 in
    --target) target=$2 ;;
    --tag) tag=$2 ;;
    --engine) engine=$2 ;;
    --) shift; break ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$self"; [ "$1" = --help ] && exit 0 || exit 2 ;;
  esac
  shift 2
done
version=$(sed -n 's/.*kVersion\[\] = "\(.*\)";/\1/p' server/config.h)
if [ -z "$tag" ]; then
  tag=sinkhorn-server:$version
  [ "$target" = cpu ] || tag+=-$target
fi
for candidate in docker podman buildah; do
  [ -n "$engine" ] || ! command -v "$candidate" >/dev/null || engine=$candidate
done
[ -n "$engine" ] || { echo "build.sh: install docker, podman or buildah" >&2; exit 1; }

arguments=(--build-arg=PROGRAMS=compiled)  # The default, but buildah 1.28 takes stages by name only from the command line.
[ "$target" = cpu ] || arguments+=(--build-arg=TOOLKIT=nvidia/cuda:13.0.1-devel-ubuntu22.04)

build=(--file deploy/container/Dockerfile --target "$target" --tag "$tag" "${arguments[@]}" "$@" .)
case $engine in
  docker) DOCKER_BUILDKIT=1 docker build "${build[@]}" ;;
  podman) podman build --format docker --ignorefile deploy/container/Dockerfile.dockerignore "${build[@]}" ;;
  buildah) buildah bud --format docker --ignorefile deploy/container/Dockerfile.dockerignore "${build[@]}" ;;
  *) echo "build.sh: --engine must be docker, podman or buildah; got $engine" >&2; exit 2 ;;
esac
if [ "$engine" = buildah ]; then
  echo "$tag: $(buildah images --format '{{.Size}}' "$tag")"
else
  echo "$tag: $("$engine" image inspect --format '{{.Size}}' "$tag") bytes"
fi
