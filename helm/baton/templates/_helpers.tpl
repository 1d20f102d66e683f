{{/* What several templates say. */}}

{{/* The start of every name. */}}
{{- define "baton.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $full | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* A name of the given parts that is a DNS label: one that is too long ends in a hash of all of it. */}}
{{- define "baton.name" -}}
{{- $name := compact . | join "-" -}}
{{- if gt (len $name) 63 }}{{ $name = printf "%s-%s" (trunc 54 $name) (sha256sum $name | trunc 8) }}{{ end -}}
{{- $name -}}
{{- end }}

{{/* (root component): what selectors name. */}}
{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* (root component) */}}
{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: baton
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (workload): what a worker's pods, and with them the EndpointSlices of its Service, are found by. */}}
{{- define "baton.workerLabels" -}}
baton.dev/model: {{ .key }}
baton.dev/pool: {{ .pool }}
baton.dev/role: {{ .role }}
baton.dev/revision: {{ .revision }}
{{- end }}

{{/* (root image repository): image is {repository, tag}, both optional. */}}
{{- define "baton.image" -}}
{{- $image := .image | default dict -}}
{{- $tag := $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- $name := printf "%s:%s" ($image.repository | default .repository) $tag -}}
{{- compact (list (.root.Values.image.registry | trimSuffix "/") $name) | join "/" -}}
{{- end }}

{{/* (map): one flag of the binaries for each entry. toJson, because templates print large numbers as 1e+06. */}}
{{- define "baton.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ $value | ternary "" "no-" }}{{ $name }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $name $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $name (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* (list of maps): later ones win. As JSON. mergeOverwrite will not do: to it, false and 0 are nothing. */}}
{{- define "baton.merge" -}}
{{- $merged := dict -}}
{{- range . -}}
{{- range $name, $value := . -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $merged $name)) -}}
{{- $value = include "baton.merge" (list (get $merged $name) $value) | fromJson -}}
{{- end -}}
{{- $_ := set $merged $name $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end }}

{{/* The models by key, as JSON. Not in values.yaml, where the demo model would stay beside those that users add. The
     pods of the demo model fit into what they request: the KV cache is small by default, and malloc returns tensors of 4
     MiB or more to the system when they are freed. Without that limit malloc keeps up to 200 MiB of them, but prompts
     take 8 % less time. */}}
{{- define "baton.models" -}}
{{- $engine := merge (deepCopy .Values.worker.engine) (dict "num-blocks" 1024) -}}
{{- $env := default list .Values.worker.extraEnv -}}
{{- $threshold := "MALLOC_MMAP_THRESHOLD_" -}}
{{- $given := false -}}
{{- range $env -}}
{{- $given = or $given (eq .name $threshold) -}}
{{- end -}}
{{- if not $given -}}
{{- $env = append $env (dict "name" $threshold "value" "4194304") -}}
{{- end -}}
{{- $demo := dict "name" "baton-demo" "prefill" dict "worker" (dict "engine" $engine "extraEnv" $env) -}}
{{- $models := deepCopy .Values.models | default (dict "demo" $demo) -}}
{{- $names := list -}}
{{- range $key, $model := $models -}}
{{- $_ := set $model "name" ($model.name | default $key) -}}
{{- if has $model.name $names -}}
{{- fail (printf "models.%s.name: there are two models with the name %q" $key $model.name) -}}
{{- end -}}
{{- $names = append $names $model.name -}}
{{- end -}}
{{- toJson $models -}}
{{- end }}

{{/*
All prefill and decode workloads, as JSON: {"list": [{name, key, model, pool, role, path, revision, volume, scaled, spec}]}.
A spec is `worker`, then what the model says of its workers and of the role, then what a canary says of both.
*/}}
{{- define "baton.workloads" -}}
{{- $root := . -}}
{{- $list := list -}}
{{- range $key, $model := include "baton.models" . | fromJson -}}
{{- $sets := list (dict "pool" "default" "revision" "stable" "layers" (list $model)) -}}
{{- $canary := $model.canary | default dict -}}
{{- if $canary.enabled -}}
{{- $revision := $canary.revision | default "canary" -}}
{{- $sets = append $sets (dict "pool" "default" "revision" $revision "layers" (list $model $canary)) -}}
{{- end -}}
{{- range $model.pools -}}
{{- $sets = append $sets (dict "pool" .name "revision" "stable" "layers" (list (pick $model "worker" "volume") .)) -}}
{{- end -}}
{{- range $set := $sets -}}
{{- range $role := list "prefill" "decode" -}}
{{- $specs := list $root.Values.worker -}}
{{- $wanted := eq $role "decode" -}}
{{- $volume := dict -}}
{{- range $set.layers -}}
{{- $specs = concat $specs (list (.worker | default dict) (get . $role | default dict)) -}}
{{- $wanted = or $wanted (kindIs "map" (get . $role)) -}}
{{- $volume = .volume | default $volume -}}
{{- end -}}
{{- if $wanted -}}
{{- $path := printf "models.%s.%s" $key $role -}}
{{- $pool := eq $set.pool "default" | ternary "" $set.pool -}}
{{- $revision := eq $set.revision "stable" | ternary "" $set.revision -}}
{{- $name := include "baton.name" (list (include "baton.fullname" $root) $key $pool $role $revision) -}}
{{- $spec := include "baton.merge" $specs | fromJson -}}
{{- $scaled := and (not $pool) (not $revision) (dig "scaler" "enabled" false $model) -}}
{{- include "baton.oneScaler" (dict "path" $path "scaler" $scaled "hpa" $spec.hpa.enabled "keda" $spec.keda.enabled) -}}
{{- $workload := dict "name" $name "key" $key "model" $model.name "pool" $set.pool "role" $role "path" $path -}}
{{- $rest := dict "revision" $set.revision "volume" $volume "scaled" $scaled "spec" $spec -}}
{{- $list = append $list (merge $workload $rest) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "list" $list | toJson -}}
{{- end }}

{{/* (path scaler hpa keda): refuses what several would scale. */}}
{{- define "baton.oneScaler" -}}
{{- $enabled := list -}}
{{- range $name := list "scaler" "hpa" "keda" }}{{ if get $ $name }}{{ $enabled = append $enabled $name }}{{ end }}{{ end -}}
{{- if gt (len $enabled) 1 -}}
{{- fail (printf "%s: %s cannot scale it together; enable one" .path (join " and " $enabled)) -}}
{{- end -}}
{{- end }}

{{/*
(root name count autoscaled): YAML with either `replicas`, the number to write, or `scaled: true`, which means to write
none. A field has one owner, so the chart writes no replicas of a Deployment that is autoscaled, nor, once autoscaling
is turned off, until somebody other than the autoscaler has changed them. There is one exception: a manifest that no
longer says how many there are, where the one before did, resets them to 1. So the chart looks the live number up and
writes it where autoscaling is turned on. With server-side apply it stops when the autoscaler has changed the number
and owns it; otherwise it goes on.
An annotation marks Deployments whose manifest had no replicas.
*/}}
{{- define "baton.replicas" -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace .name -}}
{{- $scaled := false -}}
{{- $applied := false -}}
{{- range dig "metadata" "managedFields" list $live -}}
{{- $ours := has .manager (list "baton-controller" "kube-controller-manager") -}}
{{- if and $ours (eq (.subresource | default "") "scale") (hasKey (dig "fieldsV1" "f:spec" dict .) "f:replicas") -}}
{{- $scaled = true -}}
{{- else if and (eq .operation "Apply") (not .subresource) -}}
{{- $applied = true -}}
{{- end -}}
{{- end -}}
{{- $without := dig "metadata" "annotations" "baton.dev/replicas" "" $live | eq "scaled" -}}
{{- if or (and $scaled (or $applied $without)) (and .autoscaled (or (not $live) $without)) -}}
scaled: true
{{- else if and $live (or $scaled .autoscaled) -}}
replicas: {{ int $live.spec.replicas }}
{{- else -}}
replicas: {{ int .count }}
{{- end -}}
{{- end }}

{{/* (canary): names its settings. The controller begins anew with others. */}}
{{- define "baton.generation" -}}
{{- toJson . | sha256sum | trunc 12 -}}
{{- end }}

{{/* Whether the controller has anything to do: "true" or nothing. */}}
{{- define "baton.controlled" -}}
{{- range include "baton.models" . | fromJson -}}
{{- $analysed := and (dig "canary" "enabled" false .) (dig "canary" "analysis" "enabled" false .) -}}
{{- if or $analysed (dig "scaler" "enabled" false .) }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* Seconds between the end of a pod's endpoints and SIGTERM, so that nobody sends it anything new by then. */}}
{{- define "baton.preStopSeconds" -}}5{{- end }}

{{- define "baton.preStop" -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ include "baton.preStopSeconds" . }}
{{- end }}

{{/* (root margin): what preStop, the drain and what comes after it take. */}}
{{- define "baton.terminationSeconds" -}}
{{- add (include "baton.preStopSeconds" . | int) (int .root.Values.drainSeconds) .margin -}}
{{- end }}

{{/* (root spec account token): what all pods have in common. */}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.name" (list (include "baton.fullname" .root) .account) }}
automountServiceAccountToken: {{ .token | default false }}
# The variables of a Service called "baton" would be taken for settings, BATON_PORT for one.
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $.spec $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* (spec selector): where values name none, pods stay apart as far as they can. */}}
{{- define "baton.spread" -}}
topologySpreadConstraints:
{{- if .spec.topologySpreadConstraints }}
  {{- toYaml .spec.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .selector | nindent 8 }}
{{- end }}
{{- end }}

{{- define "baton.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* (root name component selector) */}}
{{- define "baton.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
spec:
  # Not minAvailable: with one replica that would let no node be drained.
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- .selector | nindent 6 }}
{{- end }}

{{/* (key volume): where a pod finds the model. */}}
{{- define "baton.modelFolder" -}}
{{- $volume := .volume | default dict -}}
{{- if not $volume }}/opt/baton/demo-model
{{- else }}
{{- $inside := dig "path" "" ($volume.pvc | default $volume.image | default dict) | trimAll "/" -}}
{{- if dig "image" "copy" false $volume }}{{ $inside = "" }}{{ end -}}
{{- compact (list "/models" .key $inside) | join "/" -}}
{{- end -}}
{{- end }}

{{/* (key volume) */}}
{{- define "baton.modelVolume" -}}
{{- with .volume }}
- name: model-{{ $.key }}
  {{- if .pvc }}
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName }}
    readOnly: true
  {{- else if .hostPath }}
  hostPath:
    path: {{ .hostPath.path }}
    type: Directory
  {{- else if and .image (not .image.copy) }}
  image:
    reference: {{ .image.reference }}
    {{- with .image.pullPolicy }}
    pullPolicy: {{ . }}
    {{- end }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ (.image | default .download).size }}
  {{- end }}
{{- end }}
{{- end }}

{{/* (key volume) */}}
{{- define "baton.modelMount" -}}
{{- if .volume }}
- name: model-{{ .key }}
  mountPath: /models/{{ .key }}
  readOnly: true
{{- end }}
{{- end }}

{{/* (key revision volume image weights): the init container that fills the volume, for volumes that need one. The
     gateway needs no weights. */}}
{{- define "baton.modelInit" -}}
{{- with .volume }}
{{- if or .download (dig "image" "copy" false .) }}
- name: model-{{ $.key }}
  {{- if .download }}
  image: {{ $.image }}
  command:
    - python
    - /etc/baton-download/download.py
    - /etc/baton-download/{{ $.key }}-{{ $.revision }}.json
    - /models/{{ $.key }}
  {{- with .download.tokenSecret }}
  env:
    - name: DOWNLOAD_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .name }}
          key: {{ .key }}
  {{- end }}
  {{- else }}
  image: {{ .image.reference }}
  {{- with .image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  command:
    - sh
    - -ec
    - cd "$0"; for file in *; do case "$file" in {{ $.weights | ternary "" "*.safetensors) ;; " }}*) cp -R "$file" "$1/";; esac; done
    - {{ printf "/%s" (trimPrefix "/" (.image.path | default "")) | quote }}
    - /models/{{ $.key }}
  {{- end }}
  {{- if and .download (not $.weights) }}
  args: [--no-weights]
  {{- end }}
  {{- include "baton.containerSecurity" $ | nindent 2 }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {cpu: "2", memory: 1Gi}
  volumeMounts:
    - name: model-{{ $.key }}
      mountPath: /models/{{ $.key }}
    {{- if .download }}
    - name: download
      mountPath: /etc/baton-download
      readOnly: true
    {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Name of the Secret with tenants.yaml; nothing when no key is needed. */}}
{{- define "baton.tenantsSecret" -}}
{{- with .Values.tenants -}}
{{- $said := or .tenants .keys -}}
{{- if and .existingSecret $said }}{{ fail "tenants: give either existingSecret or tenants and keys" }}{{ end -}}
{{- .existingSecret -}}
{{- if $said }}{{ include "baton.fullname" $ }}-tenants{{ end -}}
{{- end -}}
{{- end }}

{{/* As JSON, {name, key} of the Secret with the URL of Redis; empty without Redis. */}}
{{- define "baton.redisSecret" -}}
{{- $external := .Values.redis.external -}}
{{- if and .Values.redis.enabled $external.existingSecret -}}
{{- fail "redis: give either enabled or external.existingSecret" -}}
{{- end -}}
{{- if .Values.redis.enabled -}}
{{- $made := printf "%s-redis" (include "baton.fullname" .) -}}
{{- dict "name" (.Values.redis.existingSecret | default $made) "key" "url" | toJson -}}
{{- else if $external.existingSecret -}}
{{- dict "name" $external.existingSecret "key" $external.key | toJson -}}
{{- else -}}
{{- toJson dict -}}
{{- end -}}
{{- end }}

{{/* Name of the Secret with the gateway's certificate; nothing without TLS. */}}
{{- define "baton.tlsSecret" -}}
{{- with .Values.gateway.tls -}}
{{- if .enabled -}}
{{- if not (or .existingSecret .certManager.issuerRef) -}}
{{- fail "gateway.tls: give existingSecret or certManager.issuerRef" -}}
{{- end -}}
{{- .existingSecret | default (printf "%s-gateway-tls" (include "baton.fullname" $)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Name of the Secret with the certificate by which pods know each other; nothing without TLS between them. */}}
{{- define "baton.peerTlsSecret" -}}
{{- with .Values.peerTls -}}
{{- if .enabled -}}
{{- if eq (empty .existingSecret) (not .certManager.enabled) -}}
{{- fail "peerTls: give either existingSecret or certManager.enabled" -}}
{{- end -}}
{{- if and $.Values.gpuPairs.enabled (not $.Values.gpuPairs.unencrypted) -}}
{{- fail "peerTls: NCCL encrypts nothing; set gpuPairs.unencrypted to have it nevertheless, or gpuPairs.enabled to false" -}}
{{- end -}}
{{- .existingSecret | default (printf "%s-peer-tls" (include "baton.fullname" $)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Name of the Secret with the tokens by which pods recognise each other; nothing where peerTls does that alone. */}}
{{- define "baton.peerTokenSecret" -}}
{{- with .Values.peerToken -}}
{{- if and .enabled (or .existingSecret (not $.Values.peerTls.enabled)) -}}
{{- .existingSecret | default (printf "%s-peer-token" (include "baton.fullname" $)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The release's own, so that two releases under one authority are no peers. */}}
{{- define "baton.peerTlsName" -}}
{{- .Values.peerTls.name | default (printf "%s-peer.%s" (include "baton.fullname" .) .Release.Namespace) -}}
{{- end }}

{{/* How pods recognise each other: flags, mounts and volumes of gateways and workers. */}}
{{- define "baton.peerFlags" -}}
{{- if include "baton.peerTokenSecret" . }}
- --peer-token-file=/etc/baton-peer-token/tokens
{{- end }}
{{- if include "baton.peerTlsSecret" . }}
- --peer-tls-cert-file=/etc/baton-peer-tls/tls.crt
- --peer-tls-key-file=/etc/baton-peer-tls/tls.key
- --peer-tls-ca-file=/etc/baton-peer-tls/ca.crt
- --peer-tls-name={{ include "baton.peerTlsName" . }}
{{- end }}
{{- end }}

{{- define "baton.peerMounts" -}}
{{- if include "baton.peerTokenSecret" . }}
- name: peer-token
  mountPath: /etc/baton-peer-token
  readOnly: true
{{- end }}
{{- if include "baton.peerTlsSecret" . }}
- name: peer-tls
  mountPath: /etc/baton-peer-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.peerVolumes" -}}
{{- with include "baton.peerTokenSecret" . }}
- name: peer-token
  secret:
    secretName: {{ . }}
    # For the group of podSecurityContext.fsGroup.
    defaultMode: 0440
    items:
      - key: tokens
        path: tokens
{{- end }}
{{- with include "baton.peerTlsSecret" . }}
- name: peer-tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}
