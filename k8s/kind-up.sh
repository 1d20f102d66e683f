#!/usr/bin/env bash
# Creates a kind cluster with ingress-nginx, and Baton with the demo model. Needs docker, kind, kubectl and helm.
set -euo pipefail
cd "$(dirname "$0")/.."

kind get clusters | grep -qx baton || kind create cluster --config k8s/kind.yaml
version=$(sed -n 's/^appVersion: //p' helm/baton/Chart.yaml)
for image in gateway worker-cpu; do
  docker build --file "docker/$image.Dockerfile" --tag "baton/$image:$version" .
  kind load docker-image --name baton "baton/$image:$version"
done

helm upgrade --install ingress-nginx ingress-nginx --repo https://kubernetes.github.io/ingress-nginx \
  --kube-context kind-baton --namespace ingress-nginx --create-namespace --wait \
  --set controller.hostPort.enabled=true --set controller.service.type=ClusterIP \
  --set-string controller.nodeSelector.ingress-ready=true \
  --set 'controller.tolerations[0].operator=Exists'
helm upgrade --install baton helm/baton --kube-context kind-baton --namespace baton --create-namespace --wait \
  --values helm/baton/values-cpu-demo.yaml --set ingress.enabled=true
helm test baton --kube-context kind-baton --namespace baton --logs
