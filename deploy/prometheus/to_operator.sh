#!/usr/bin/env bash
# Prints alerts.yml as the Prometheus operator's PrometheusRule:
#   deploy/prometheus/to_operator.sh >deploy/kubernetes/components/monitoring/prometheusrule.yaml
set -euo pipefail
cat <<'TEXT'
# Made from deploy/prometheus/alerts.yml by to_operator.sh there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: sinkhorn
spec:
TEXT
sed -n '/^groups:/,$ s/^\(.\)/  \1/p; /^$/p' "$(dirname "$0")/alerts.yml"
