#!/usr/bin/env bash
# Makes the certificates of a trial: certificates.sh DIR leaves there ca.crt, ca.key and, signed by it for servers and
# clients named `sinkhorn` or `localhost`, tls.crt and tls.key. Valid for 30 days. Not for production: see deploy/RUNBOOK.md.
set -euo pipefail
dir=$1
mkdir -p "$dir"
cd "$dir"
umask 077

curve=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30)
openssl req -x509 "${curve[@]}" -keyout ca.key -out ca.crt -subj "/CN=sinkhorn trial authority" \
  -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign"
openssl req -x509 "${curve[@]}" -CA ca.crt -CAkey ca.key -keyout tls.key -out tls.crt -subj "/CN=sinkhorn" \
  -addext "subjectAltName=DNS:sinkhorn,DNS:localhost,IP:127.0.0.1" \
  -addext "basicConstraints=critical,CA:FALSE" -addext "extendedKeyUsage=serverAuth,clientAuth"
