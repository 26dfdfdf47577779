#!/usr/bin/env bash
# Installs what building and testing need on Debian 12, from Debian's own packages. Does nothing when all is there.
# install.sh --build leaves out what only the tests need.
#
# CUDA is not among them: nvcc, if you have it, is found on PATH, in $CUDA_HOME or in /usr/local/cuda; without it the
# CUDA backend is left out of the build.
set -euo pipefail

packages=(
  # The build.
  g++ git bazel-bootstrap bazel-platforms bazel-rules-java bazel-rules-proto bazel-skylib
  # The libraries (deploy/bazel/system.BUILD).
  libabsl-dev libgrpc++-dev libprotobuf-dev prometheus-cpp-dev libhwy-dev libeigen3-dev
  libgoogle-perftools-dev
  protobuf-compiler protobuf-compiler-grpc
  python3
)
[ "${1:-}" = --build ] || packages+=(
  libgtest-dev libgmock-dev libbenchmark-dev python3-venv python3-pip python3-dev
  # The tests of deploy/: namespaces, certificates, alert rules, images, a second balancer.
  iproute2 openssl prometheus buildah mmdebstrap haproxy
  # The fuzzers.
  clang-14 libclang-rt-14-dev
)

installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  grep -qx -- "$package installed" <<<"$installed" || missing+=("$package")
done
[ "${#missing[@]}" -gt 0 ] || exit 0

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "install.sh: run as root, or install sudo; missing: ${missing[*]}" >&2; exit 1; }
  sudo=(sudo)
fi
echo "Installing ${missing[*]}"
apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" >/dev/null; }
apt update
# The tests start their own prometheus and haproxy: Debian's packages must not start theirs.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" >/dev/null
  "${sudo[@]}" chmod +x "$policy"
  trap '"${sudo[@]}" rm -f "$policy"' EXIT
fi
apt install --yes --no-install-recommends "${missing[@]}"
for service in prometheus haproxy; do  # Nor at the next boot.
  [[ " ${missing[*]} " = *" $service "* ]] && "${sudo[@]}" systemctl -q disable "$service" 2>/dev/null || true
done
