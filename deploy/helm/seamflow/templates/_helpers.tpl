{{- define "seamflow.labels" -}}
app.kubernetes.io/part-of: {{ .Values.name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Whether this release installs a service or pool: (list $ name entry). */}}
{{- define "seamflow.installs" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $entry := index . 2 -}}
{{- if and $entry.enabled (or (empty $root.Values.only) (has $name $root.Values.only)) }}true{{ end -}}
{{- end -}}

{{- define "seamflow.image" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}
{{- $digest := get $root.Values.image.digests $name -}}
{{- if $digest -}}
{{ printf "%s/%s@%s" $root.Values.image.registry $name $digest }}
{{- else -}}
{{ printf "%s/%s:%s" $root.Values.image.registry $name ($root.Values.image.tag | default $root.Chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{/* Settings that every process shares: (dict "root" $ "service" whose-certificate-it-shows). */}}
{{- define "seamflow.common" -}}
host: {{ .root.Values.listenAddress | quote }}
admin_port: 9100
certificate_identities: true
tls_ca_file: /secrets/{{ .service }}/ca.crt
tls_cert_file: /secrets/{{ .service }}/tls.crt
tls_key_file: /secrets/{{ .service }}/tls.key
{{- end -}}

{{/* A table of settings as TOML: (dict "root" $ "service" name "settings" map). "{name}" is the deployment's. */}}
{{- define "seamflow.toml" -}}
{{- $common := fromYaml (include "seamflow.common" .) -}}
{{- $settings := mergeOverwrite $common .settings -}}
{{- toToml (dict (.service | replace "-" "_") $settings) | replace "{name}" .root.Values.name | replace "{{" "{" | replace "}}" "}" -}}
{{- end -}}

{{- define "seamflow.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.name }}{{ else }}default{{ end -}}
{{- end -}}

{{/* What the pods of all kinds share: (dict "root" $ "service" certificate-name). */}}
{{- define "seamflow.podSpec" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "seamflow.serviceAccountName" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (.graceSeconds | default 30) $root.Values.preStopSeconds }}
securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* New connections are served until every load balancer knows that the pod ends; the argument is the root. */}}
{{- define "seamflow.preStop" -}}
lifecycle:
  preStop:
    exec: {command: [sleep, {{ .Values.preStopSeconds | quote }}]}
{{- end -}}

{{- define "seamflow.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: admin}
  periodSeconds: 2
  failureThreshold: {{ .startFailures | default 60 }}
livenessProbe:
  httpGet: {path: /healthz, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 2
  timeoutSeconds: 3
{{- end -}}

{{/* Certificates, tokens and the store's URL: (dict "root" $ "services" names "tokens" keys "hasStore" bool). */}}
{{- define "seamflow.secretsVolume" -}}
{{- $root := .root -}}
name: secrets
projected:
  defaultMode: 0440
  sources:
{{- range $service := .services }}
    - secret:
        name: {{ printf "%s-%s-tls" $root.Values.name $service }}
        items:
          - {key: ca.crt, path: {{ $service }}/ca.crt}
          - {key: tls.crt, path: {{ $service }}/tls.crt}
          - {key: tls.key, path: {{ $service }}/tls.key}
{{- end }}
{{- with .tokens }}
    - secret:
        name: {{ $root.Values.tokens.existingSecret }}
        items:
{{- range . }}
          - {key: {{ . }}, path: {{ . }}}
{{- end }}
{{- end }}
{{- if .hasStore }}
    - secret:
        name: {{ $root.Values.redis.existingSecret }}
        items:
          - {key: {{ first .services }}, path: redis_url}
{{- end }}
{{- end -}}

{{- define "seamflow.dataClaim" -}}
{{ .Values.data.existingClaim | default (printf "%s-data" .Values.name) }}
{{- end -}}

{{/* Host memory of a node's pod: (dict "parameters" "tags" "together" pods-of-a-trainer "servers"). While it is lent, a trainer keeps
12 bytes a parameter on the host, beside the copy that is published and that of a checkpoint, on all of its pods together; each
rollout server prepares a version of 2 bytes a parameter beside the page cache of its files. */}}
{{- define "seamflow.memory" -}}
{{- $bytes := 0.0 -}}
{{- if has "train" .tags }}{{- $bytes = addf $bytes (divf (mulf 26 (float64 .parameters)) .together) -}}{{- end -}}
{{- if has "rollout" .tags }}{{- $bytes = addf $bytes (mulf 4 (float64 .parameters) .servers) -}}{{- end -}}
{{- $gibibytes := add 8 (int64 (ceil (divf $bytes 1073741824))) -}}
request: {{ $gibibytes }}Gi
limit: {{ div (mul 3 $gibibytes) 2 }}Gi
{{- end -}}
