{{/* Helpers shared by several templates. */}}

{{/* The prefix of the names of all resources. */}}
{{- define "baton.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $full | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* (list of parts): a DNS label made of the parts. A name that is too long is cut off and ends in its hash. */}}
{{- define "baton.name" -}}
{{- $name := compact . | join "-" -}}
{{- if gt (len $name) 63 }}{{ $name = printf "%s-%s" (trunc 54 $name) (sha256sum $name | trunc 8) }}{{ end -}}
{{- $name -}}
{{- end }}

{{/* (root component): the labels that selectors match. */}}
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

{{/* (workload): the labels by which gateways find a worker's pods and the EndpointSlices of its Service. */}}
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

{{/* (list of maps): the merged map as JSON; later maps win. mergeOverwrite would ignore false and 0. */}}
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

{{/* The models by key, as JSON. The demo model is not in values.yaml, because it would stay there beside models that
     users add. Its pods fit into the memory that they request: the KV cache is small by default, and malloc returns
     tensors of 4 MiB or more to the system when they are freed. Without that limit malloc keeps up to 200 MiB of them,
     but prompts take 8 % less time. */}}
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
A spec merges `worker`, the model's settings for workers and for the role, and the canary's settings for both. Later ones
win.
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

{{/* (path scaler hpa keda): fails when more than one of them would scale a Deployment. */}}
{{- define "baton.oneScaler" -}}
{{- $enabled := list -}}
{{- range $name := list "scaler" "hpa" "keda" }}{{ if get $ $name }}{{ $enabled = append $enabled $name }}{{ end }}{{ end -}}
{{- if gt (len $enabled) 1 -}}
{{- fail (printf "%s: %s cannot scale it together; enable one" .path (join " and " $enabled)) -}}
{{- end -}}
{{- end }}

{{/*
(root name count autoscaled): YAML with either `replicas`, the number to render, or `scaled: true`: render no replicas.
A field should have one owner, so the chart renders no replicas for an autoscaled Deployment. After autoscaling has been
turned off, it renders none until a client other than the autoscaler has changed them. There is one exception: when a
manifest drops replicas that the previous one had, Kubernetes resets them to 1. So when autoscaling is turned on, the
chart looks up the live number and renders it. With server-side apply, the chart stops this once the autoscaler has
changed the number and so owns the field. Without server-side apply, it continues.
An annotation marks Deployments whose manifest had no replicas.
*/}}
{{- define "baton.replicas" -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace .name -}}
{{- $scaled := false -}}
{{- $applied := false -}}
{{- range dig "metadata" "managedFields" list $live -}}
{{- $autoscaler := has .manager (list "baton-controller" "kube-controller-manager") -}}
{{- if and $autoscaler (eq (.subresource | default "") "scale") (hasKey (dig "fieldsV1" "f:spec" dict .) "f:replicas") -}}
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

{{/* (canary): a hash of the canary's settings. When it changes, the controller starts the canary again. */}}
{{- define "baton.generation" -}}
{{- toJson . | sha256sum | trunc 12 -}}
{{- end }}

{{/* Whether the release needs a controller: "true" or empty. */}}
{{- define "baton.controlled" -}}
{{- range include "baton.models" . | fromJson -}}
{{- $analysed := and (dig "canary" "enabled" false .) (dig "canary" "analysis" "enabled" false .) -}}
{{- if or $analysed (dig "scaler" "enabled" false .) }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* Seconds between the removal of a pod's endpoints and SIGTERM, so that clients have stopped using it by then. */}}
{{- define "baton.preStopSeconds" -}}5{{- end }}

{{- define "baton.preStop" -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ include "baton.preStopSeconds" . }}
{{- end }}

{{/* (root margin): seconds for preStop and the drain, plus `margin` seconds for the shutdown after it. */}}
{{- define "baton.terminationSeconds" -}}
{{- add (include "baton.preStopSeconds" . | int) (int .root.Values.drainSeconds) .margin -}}
{{- end }}

{{/* (root spec account token): the part of a pod spec that all pods share. */}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.name" (list (include "baton.fullname" .root) .account) }}
automountServiceAccountToken: {{ .token | default false }}
# A Service named "baton" would set variables such as BATON_PORT, which Baton would read as settings.
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

{{/* (spec selector): the spread of pods. Without one in the values, pods spread over nodes as far as possible. */}}
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
  # With minAvailable, a single replica would block draining its node.
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- .selector | nindent 6 }}
{{- end }}

{{/* (key volume): the path of the model folder in a pod. */}}
{{- define "baton.modelFolder" -}}
{{- $volume := .volume | default dict -}}
{{- if not $volume }}/opt/baton/demo-model
{{- else }}
{{- $inside := dig "path" "" ($volume.pvc | default $volume.image | default dict) | trimAll "/" -}}
{{- if dig "image" "copy" false $volume }}{{ $inside = "" }}{{ end -}}
{{- /* The layout of the cache of Hugging Face's tools, in which `baton model pull` writes. */ -}}
{{- with $volume.hub }}
{{- $inside = printf "models--%s/snapshots/%s" (replace "/" "--" .repo) .revision }}
{{- end -}}
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
  {{- else if dig "hub" "cache" "pvc" false . }}
  persistentVolumeClaim:
    claimName: {{ .hub.cache.pvc.claimName }}
  {{- else if dig "hub" "cache" "hostPath" false . }}
  hostPath:
    path: {{ .hub.cache.hostPath.path }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ (.image | default .hub).size }}
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

{{/* (key volume image weights pullPolicy): the init container that fills the volume, for volumes that need one. The
     gateway needs no weights. */}}
{{- define "baton.modelInit" -}}
{{- with .volume }}
{{- if or .hub (dig "image" "copy" false .) }}
- name: model-{{ $.key }}
  {{- if .hub }}
  image: {{ $.image }}
  imagePullPolicy: {{ $.pullPolicy }}
  args:
    - model
    - pull
    - {{ printf "%s@%s" .hub.repo .hub.revision }}
    - --cache=/models/{{ $.key }}
    {{- with .hub.size }}
    - --volume-size={{ . }}
    {{- end }}
    {{- if not $.weights }}
    - --no-weights
    {{- end }}
  {{- with include "baton.hubEnv" .hub | trim }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  # `kubectl describe pod` shows why a model cannot be downloaded.
  terminationMessagePolicy: FallbackToLogsOnError
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
  {{- include "baton.containerSecurity" $ | nindent 2 }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {cpu: "2", memory: 1Gi}
  volumeMounts:
    - name: model-{{ $.key }}
      mountPath: /models/{{ $.key }}
{{- end }}
{{- end }}
{{- end }}

{{/* (hub): what `baton model pull` reads from its environment. */}}
{{- define "baton.hubEnv" -}}
{{- with .tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- with .endpoint }}
- name: HF_ENDPOINT
  value: {{ quote . }}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Name of the Secret with tenants.yaml; empty when clients need no key. */}}
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

{{/* Name of the Secret with the gateway's certificate; empty without TLS. */}}
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

{{/* Name of the Secret with the certificate for TLS between pods; empty without it. */}}
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

{{/* Name of the Secret with the tokens by which pods authenticate each other; empty when only peerTls is used. */}}
{{- define "baton.peerTokenSecret" -}}
{{- with .Values.peerToken -}}
{{- if and .enabled (or .existingSecret (not $.Values.peerTls.enabled)) -}}
{{- .existingSecret | default (printf "%s-peer-token" (include "baton.fullname" $)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The DNS name in peer certificates. It is unique to the release, so that two releases with one authority refuse
     each other. */}}
{{- define "baton.peerTlsName" -}}
{{- .Values.peerTls.name | default (printf "%s-peer.%s" (include "baton.fullname" .) .Release.Namespace) -}}
{{- end }}

{{/* The flags of gateways and workers by which pods authenticate each other. Mounts and volumes follow below. */}}
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
    # Readable by the group of podSecurityContext.fsGroup.
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
