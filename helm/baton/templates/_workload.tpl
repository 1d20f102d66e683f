{{/* (root workload): Deployment, headless Service and PodDisruptionBudget of one role of one revision of a model. */}}
{{- define "baton.workload" -}}
{{- $root := .root -}}
{{- $workload := .workload -}}
{{- $spec := $workload.spec -}}
{{- $gpus := int $spec.gpus -}}
{{- $device := gt $gpus 0 | ternary "cuda" "cpu" -}}
{{- $repository := printf "baton/worker-%s" $device -}}
{{- $ranks := int $spec.tensorParallel -}}
{{- $stages := int $spec.pipelineParallel -}}
{{- $processes := mul $ranks $stages | int -}}
{{- if and (gt $gpus 0) (gt $processes 1) (ne $gpus $processes) -}}
{{- $asked := printf "tensorParallel is %d" $ranks -}}
{{- if gt $stages 1 }}{{ $asked = printf "%s, pipelineParallel is %d" $asked $stages }}{{ end -}}
{{- fail (printf "%s: %s and gpus is %d; each process needs one GPU" $workload.path $asked $gpus) -}}
{{- end -}}
{{- /* The KV of several pipeline stages goes through the host. */ -}}
{{- $pairs := and $root.Values.gpuPairs.enabled (le $stages 1) -}}
{{- $image := include "baton.image" (dict "root" $root "image" $spec.image "repository" $repository) -}}
{{- $component := dict "root" $root "component" $workload.role -}}
{{- $selector := printf "%s\n%s" (include "baton.selectorLabels" $component) (include "baton.workerLabels" $workload) -}}
{{- $model := dict "key" $workload.key "volume" $workload.volume "image" $image "weights" true -}}
{{- $_ := set $model "pullPolicy" $root.Values.image.pullPolicy -}}
{{- $engine := dict -}}
{{- $tls := include "baton.peerTlsSecret" $root -}}
{{- if and (eq $workload.role "decode") (eq $device "cuda") -}}
{{- /* Without gpuPairs, NCCL's ports are closed, so use TCP. With TLS, NCCL must be selected explicitly. */ -}}
{{- $transport := $pairs | ternary (empty $tls | ternary "" "nccl") "tcp" -}}
{{- with $transport }}{{ $_ := set $engine "kv-transport" . }}{{ end -}}
{{- end -}}
{{- /* Environment variables, because images of earlier versions would reject unknown flags. */ -}}
{{- $env := list -}}
{{- if and (eq $workload.role "prefill") (eq $device "cuda") (not $pairs) -}}
{{- /* Without GPU pairs, the engine need not reserve memory for them. */ -}}
{{- $env = list (dict "name" "BATON_GPU_PAIR_MEMORY" "value" "0") -}}
{{- end -}}
{{- if gt $ranks 1 -}}
{{- $env = append $env (dict "name" "BATON_TENSOR_PARALLEL" "value" (toString $ranks)) -}}
{{- end -}}
{{- if $spec.expertParallel -}}
{{- if le $ranks 1 -}}
{{- fail (printf "%s: expertParallel divides experts among the processes of tensorParallel, which is 1" $workload.path) -}}
{{- end -}}
{{- $env = append $env (dict "name" "BATON_EXPERT_PARALLEL" "value" "true") -}}
{{- end -}}
{{- if gt $stages 1 -}}
{{- $env = append $env (dict "name" "BATON_PIPELINE_PARALLEL" "value" (toString $stages)) -}}
{{- end -}}
{{- if eq $workload.role "decode" -}}
{{- $pool := eq $workload.pool "default" | ternary "" $workload.pool -}}
{{- $revision := eq $workload.revision "stable" | ternary "" $workload.revision -}}
{{- /* The headless Service of the prefill pods that gateways pair with these decode pods. */ -}}
{{- $prefill := include "baton.name" (list (include "baton.fullname" $root) $workload.key $pool "prefill" $revision) -}}
{{- $env = append $env (dict "name" "BATON_PREFILL_NETWORKS" "value" (printf "%s:50051" $prefill)) -}}
{{- end -}}
{{- $engine = include "baton.merge" (list $engine $spec.engine) | fromJson -}}
{{- $autoscaled := or $workload.scaled $spec.hpa.enabled $spec.keda.enabled -}}
{{- $sized := dict "root" $root "name" $workload.name "count" $spec.replicas "autoscaled" $autoscaled -}}
{{- $replicas := include "baton.replicas" $sized | fromYaml -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $workload.name }}
  labels:
    {{- include "baton.labels" $component | nindent 4 }}
    {{- include "baton.workerLabels" $workload | nindent 4 }}
  {{- if $replicas.scaled }}
  annotations:
    baton.dev/replicas: scaled
  {{- end }}
spec:
  {{- if not $replicas.scaled }}
  replicas: {{ int $replicas.replicas }}
  {{- end }}
  strategy:
    {{- toYaml $spec.strategy | nindent 4 }}
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
  template:
    metadata:
      # Version labels are left out, because they would restart pods that have not changed otherwise.
      labels:
        {{- $selector | nindent 8 }}
        {{- with $spec.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $spec.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "baton.pod" (dict "root" $root "spec" $spec "account" "worker") | nindent 6 }}
      {{- include "baton.spread" (dict "spec" $spec "selector" $selector) | nindent 6 }}
      # After the drain, the pod hands its remaining requests back and stops the engine.
      terminationGracePeriodSeconds: {{ include "baton.terminationSeconds" (dict "root" $root "margin" 15) }}
      {{- with include "baton.modelInit" $model }}
      initContainers:
        {{- . | trim | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ $workload.role }}
          image: {{ $image }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - {{ $workload.role }}
            - --model={{ include "baton.modelFolder" $model }}
            - {{ printf "--served-model-name=%s" $workload.model | quote }}
            - --revision={{ $workload.revision }}
            - --host=0.0.0.0
            - --port=50051
            {{- if eq $workload.role "prefill" }}
            - --kv-port=50052
            {{- end }}
            - --metrics-port=9400
            - --device={{ $device }}
            - --drain-seconds={{ int $root.Values.drainSeconds }}
            {{- with include "baton.peerFlags" $root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with include "baton.flags" $engine | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- range $spec.extraArgs }}
            - {{ . | quote }}
            {{- end }}
          {{- with concat $env (default list $spec.extraEnv) }}
          env:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            - name: grpc
              containerPort: 50051
            {{- if eq $workload.role "prefill" }}
            - name: kv
              containerPort: 50052
            {{- end }}
            - name: metrics
              containerPort: 9400
          {{- include "baton.containerSecurity" $root | nindent 10 }}
          resources:
            {{- $resources := $spec.resources }}
            {{- if gt $gpus 0 }}
            {{- $gpu := dict $spec.gpuResource $gpus }}
            {{- $resources = include "baton.merge" (list $resources (dict "requests" $gpu "limits" $gpu)) | fromJson }}
            {{- end }}
            {{- toYaml $resources | nindent 12 }}
          # The port opens when the model is loaded. Do not probe the gRPC port, because the kubelet has no certificate.
          startupProbe:
            httpGet:
              path: /live
              port: metrics
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ divf $spec.startupSeconds 5 | ceil | int }}
          readinessProbe:
            httpGet:
              path: /ready
              port: metrics
            periodSeconds: 5
            timeoutSeconds: 5
          livenessProbe:
            httpGet:
              path: /live
              port: metrics
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 6
          {{- include "baton.preStop" $root | nindent 10 }}
          volumeMounts:
            - name: tmp
              mountPath: /tmp
            - name: shm
              mountPath: /dev/shm
            {{- with include "baton.peerMounts" $root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with include "baton.modelMount" $model | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with $spec.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: tmp
          emptyDir:
            sizeLimit: {{ $spec.tmpSize }}
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {{ $spec.shmSize }}
        {{- with include "baton.peerVolumes" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "baton.modelVolume" $model | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $spec.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $workload.name }}
  # EndpointSlices inherit the labels of their Service, by which gateways find pods.
  labels:
    {{- include "baton.labels" $component | nindent 4 }}
    {{- include "baton.workerLabels" $workload | nindent 4 }}
spec:
  clusterIP: None
  # Gateways check each pod's readiness themselves, and keep their streams to draining pods.
  publishNotReadyAddresses: true
  selector:
    {{- $selector | nindent 4 }}
  ports:
    - name: grpc
      port: 50051
      targetPort: grpc
      appProtocol: {{ empty $tls | ternary "kubernetes.io/h2c" "https" }}
    {{- if eq $workload.role "prefill" }}
    - name: kv
      port: 50052
      targetPort: kv
    {{- end }}
    - name: metrics
      port: 9400
      targetPort: metrics
---
{{ include "baton.pdb" (dict "root" $root "name" $workload.name "component" $workload.role "selector" $selector) }}
{{- end }}
