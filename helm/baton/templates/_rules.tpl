{{/* Rules that depend on values; the others are in the folder rules. They select only the release's namespace, because
other releases may have other objectives. */}}

{{/* (seconds): the bound of a histogram bucket, formatted as in the label `le`. */}}
{{- define "baton.le" -}}
{{- $bound := toJson . -}}
le="{{ $bound }}{{ contains "." $bound | ternary "" ".0" }}"
{{- end }}

{{/* Alerts on the burn rate of the error budget. Each uses two windows, so that it fires and resolves quickly (Site
Reliability Workbook, chapter 5). */}}
{{- define "baton.rules.slo" -}}
{{- $namespace := printf "namespace=%q" .Release.Namespace }}
{{- $budget := printf "(1 - %s)" (toJson .Values.slo.objective) }}
{{- $ttft := dict "name" "ttft" "bound" .Values.slo.ttftSeconds
  "metric" "baton_gateway_time_to_first_token_seconds"
  "slow" (printf "had their first token later than %s s" (toJson .Values.slo.ttftSeconds)) }}
{{- $tpot := dict "name" "tpot" "bound" .Values.slo.tpotSeconds
  "metric" "baton_gateway_revision_time_per_output_token_seconds"
  "slow" (printf "took more than %s s per output token" (toJson .Values.slo.tpotSeconds)) }}
{{- $fast := dict "name" "Fast" "how" "fast" "severity" "critical" "for" "2m"
  "factor" "14.4" "long" "1h" "short" "5m" "window" "hour" "left" "two days" }}
{{- $slow := dict "name" "Slow" "how" "steadily" "severity" "warning" "for" "15m"
  "factor" "6" "long" "6h" "short" "30m" "window" "six hours" "left" "five days" }}
groups:
  - name: baton-slo-ratios
    rules:
      - record: baton:slo_objective:ratio
        expr: vector({{ toJson .Values.slo.objective }})
        labels: {namespace: {{ .Release.Namespace | quote }}}
      {{- range $slo := list $ttft $tpot }}
      - record: baton:slo_{{ .name }}_seconds
        expr: vector({{ toJson .bound }})
        labels: {namespace: {{ $.Release.Namespace | quote }}}
      {{- range $window := list "5m" "30m" "1h" "6h" }}
      - record: baton:{{ $slo.name }}_slow:ratio_rate{{ $window }}
        expr: |
          1 - sum by (namespace, model)
              (rate({{ $slo.metric }}_bucket{ {{- $namespace }}, {{ include "baton.le" $slo.bound }}}[{{ $window }}]))
            / (sum by (namespace, model) (rate({{ $slo.metric }}_count{ {{- $namespace }}}[{{ $window }}])) > 0)
      {{- end }}
      {{- end }}

  - name: baton-slo
    rules:
      {{- range $slo := list $ttft $tpot }}
      {{- range $pace := list $fast $slow }}
      {{- $ratio := printf "baton:%s_slow:ratio_rate" $slo.name }}
      - alert: Baton{{ title $slo.name }}Burns{{ $pace.name }}
        expr: |
          {{ $ratio }}{{ $pace.long }}{ {{- $namespace }}} > {{ $pace.factor }} * {{ $budget }}
            and {{ $ratio }}{{ $pace.short }}{ {{- $namespace }}} > {{ $pace.factor }} * {{ $budget }}
        for: {{ $pace.for }}
        labels: {severity: {{ $pace.severity }}}
        annotations:
          summary: The {{ upper $slo.name }} of {{ "{{ $labels.model }}" }} burns its error budget {{ $pace.how }}.
          description: >-
            {{ "{{ $value | humanizePercentage }}" }} of the requests of the last {{ $pace.window }} {{ $slo.slow }}.
            At this rate the budget of a month is used up in {{ $pace.left }}.
          runbook_url: k8s/RUNBOOKS.md#baton{{ $slo.name }}burns
      {{- end }}
      {{- end }}
{{- end }}

{{/* The cost of prefill pods is spread over prompt tokens, the cost of decode pods over generated tokens. */}}
{{- define "baton.rules.cost" -}}
{{- $namespace := printf "namespace=%q" .Release.Namespace }}
{{- $price := .Values.cost.gpuHourPrice }}
groups:
  - name: baton-cost
    rules:
      {{- range $role := list "prefill" "decode" }}
      - record: baton:cost_per_hour
        expr: |
          count by (namespace, model, role) (baton_worker_info{ {{- $namespace }}, role="{{ $role }}"}) * {{ get $price $role | toJson }}
      {{- end }}
      - record: baton:gpu_seconds_per_1k_output_tokens:rate5m
        expr: |
          1000 * count by (namespace, model, role) (baton_worker_info{ {{- $namespace }}})
            / on (namespace, model) group_left ()
            (sum by (namespace, model) (rate(baton_gateway_generation_tokens_total{ {{- $namespace }}}[5m])) > 0)
      {{- range $kind, $role := dict "prompt" "prefill" "generation" "decode" }}
      - record: baton:cost_per_1m_tokens:rate5m
        expr: |
          sum by (namespace, model) (baton:cost_per_hour{ {{- $namespace }}, role="{{ $role }}"}) * 1e6 / 3600
            / (sum by (namespace, model) (rate(baton_gateway_{{ $kind }}_tokens_total{ {{- $namespace }}}[5m])) > 0)
        labels: {kind: {{ $kind }}}
      {{- end }}
      - record: baton:tenant_cost_per_hour:rate5m
        expr: |
          sum by (namespace, model, tenant) (
            sum by (namespace, model, tenant, kind) (rate(baton_gateway_tenant_tokens_total{ {{- $namespace }}}[5m]))
              * on (namespace, model, kind) group_left () baton:cost_per_1m_tokens:rate5m{ {{- $namespace }}}
          ) * 3600 / 1e6
{{- end }}
