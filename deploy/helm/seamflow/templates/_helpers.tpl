{{- define "seamflow.labels" -}}
app.kubernetes.io/part-of: {{ .Values.name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Of an object: (list $ name), with the name of its service or pool as a third. */}}
{{- define "seamflow.meta" -}}
name: {{ index . 1 }}
labels: {{- include "seamflow.labels" (index . 0) | nindent 2 }}
  {{- if gt (len .) 2 }}
  app.kubernetes.io/name: {{ index . 2 }}
  {{- end }}
{{- end -}}

{{/* The configuration of a service's or pool's pods: (dict "root" $ "name" name "config" text). */}}
{{- define "seamflow.configMap" -}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{- include "seamflow.meta" (list .root (printf "%s-%s" .root.Values.name .name) .name) | nindent 2 }}
data:
  seamflow.toml: |
    {{- .config | nindent 4 }}
{{- end -}}

{{- define "seamflow.budget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "seamflow.meta" (list .root (printf "%s-%s" .root.Values.name .name)) | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "seamflow.selector" (list .root .name) | nindent 6 }}
{{- end -}}

{{/* Labels of pods, by which everything selects them: (list $ name). No version is among them. */}}
{{- define "seamflow.selector" -}}
app.kubernetes.io/part-of: {{ (index . 0).Values.name }}
app.kubernetes.io/name: {{ index . 1 }}
{{- end -}}

{{/* Whether this release installs a service or pool: (list $ name entry). */}}
{{- define "seamflow.installs" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $entry := index . 2 -}}
{{- if and $entry.enabled (or (empty $root.Values.only) (has $name $root.Values.only)) }}true{{ end -}}
{{- end -}}

{{/* (list $ name gpus): with GPUs the image whose torch has CUDA. A name with a "/" is a whole reference. */}}
{{- define "seamflow.image" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}
{{- $suffix := ternary "-gpu" "" (gt (int (index . 2)) 0) -}}
{{- $image := $root.Values.image -}}
{{- if hasPrefix "sha256:" $image.tag -}}
{{- fail "image.tag is a digest: give digests by image in image.digests" -}}
{{- end -}}
{{- $digest := get $image.digests (print $name $suffix) -}}
{{- if contains "/" $name -}}
{{ $name }}
{{- else if $digest -}}
{{ printf "%s/%s@%s" $image.registry $name $digest }}
{{- else -}}
{{ printf "%s/%s:%s%s" $image.registry $name ($image.tag | default $root.Chart.AppVersion) $suffix }}
{{- end -}}
{{- end -}}

{{/* Address of a service: (list $ name). */}}
{{- define "seamflow.address" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}
{{ printf "%s-%s:%v" $root.Values.name $name (get $root.Values.services $name).port }}
{{- end -}}

{{/* A table of settings as TOML: (dict "root" $ "certificate" folder "table" name "given" map "settings" map). */}}
{{- define "seamflow.toml" -}}
{{- $folder := printf "/secrets/%s" .certificate -}}
{{- $all := dict "certificate_identities" true "tls_ca_file" (printf "%s/ca.crt" $folder) -}}
{{- $_ := set $all "tls_cert_file" (printf "%s/tls.crt" $folder) -}}
{{- $_ := set $all "tls_key_file" (printf "%s/tls.key" $folder) -}}
{{- toToml (dict .table (mergeOverwrite $all .given (deepCopy .settings))) -}}
{{- end -}}

{{- define "seamflow.serviceAccountName" -}}
{{ ternary .Values.name "default" .Values.serviceAccount.create }}
{{- end -}}

{{/* What the pods of all kinds share: (dict "root" $ "graceSeconds" n). */}}
{{- define "seamflow.podSpec" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "seamflow.serviceAccountName" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (.graceSeconds | default 30) $root.Values.preStopSeconds }}
securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
imagePullSecrets: {{- toYaml $root.Values.image.pullSecrets | nindent 2 }}
{{- end -}}

{{/* A pod's spec with what values add: (dict "root" $ "entry" service-or-pool "spec" text). podSpec is merged into
it and containerSpec into its container, those of all pods first; lists are added to the chart's. */}}
{{- define "seamflow.merged" -}}
{{- $spec := fromYaml .spec -}}
{{- $container := first $spec.containers -}}
{{- range $from := list .root.Values .entry -}}
{{- $more := deepCopy ($from.containerSpec | default dict) -}}
{{- range $name := list "env" "envFrom" "ports" "volumeMounts" -}}
{{- with get $more $name }}{{ $_ := set $more $name (concat (get $container $name | default list) .) }}{{ end -}}
{{- end -}}
{{- $_ := mergeOverwrite $container $more -}}
{{- $more = deepCopy ($from.podSpec | default dict) -}}
{{- range $name := list "containers" "initContainers" "volumes" "imagePullSecrets" "tolerations" -}}
{{- with get $more $name }}{{ $_ := set $more $name (concat (get $spec $name | default list) .) }}{{ end -}}
{{- end -}}
{{- $_ := mergeOverwrite $spec $more -}}
{{- end -}}
{{- toYaml $spec -}}
{{- end -}}

{{/* A Service's spec with what values add: (dict "root" $ "entry" service-or-pool "spec" text). */}}
{{- define "seamflow.mergedService" -}}
{{- $of := deepCopy (.entry.serviceSpec | default dict) -}}
{{- toYaml (mergeOverwrite (fromYaml .spec) (deepCopy .root.Values.serviceSpec) $of) -}}
{{- end -}}

{{/* Annotations of pods: (dict "root" $ "entry" service-or-pool "config" text). */}}
{{- define "seamflow.podAnnotations" -}}
checksum/config: {{ .config | sha256sum }}
{{- with mergeOverwrite (deepCopy .root.Values.podAnnotations) (deepCopy (.entry.podAnnotations | default dict)) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What every container has: (dict "root" $ "image" name), with "gpus", and a "context" that is not that of all. */}}
{{- define "seamflow.container" -}}
image: {{ include "seamflow.image" (list .root .image (.gpus | default 0)) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext: {{- toYaml (.context | default .root.Values.securityContext) | nindent 2 }}
{{- end -}}

{{/* Of a container that serves: new connections come until every load balancer knows that the pod ends. */}}
{{- define "seamflow.served" -}}
startupProbe: {httpGet: {path: /healthz, port: admin}, periodSeconds: 2, failureThreshold: 60}
livenessProbe: {httpGet: {path: /healthz, port: admin}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
readinessProbe: {httpGet: {path: /readyz, port: admin}, periodSeconds: 2, timeoutSeconds: 3}
lifecycle: {preStop: {exec: {command: [sleep, {{ .Values.preStopSeconds | quote }}]}}}
{{- end -}}

{{- define "seamflow.mounts" -}}
- {name: config, mountPath: /etc/seamflow, readOnly: true}
- {name: secrets, mountPath: /secrets, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* Volumes of every pod: (dict "root" $ "name" service-or-pool "certificates" names "tokens" keys "store" key). */}}
{{- define "seamflow.volumes" -}}
{{- $values := .root.Values -}}
- name: config
  configMap: {name: {{ $values.name }}-{{ .name }}}
- {name: tmp, emptyDir: {}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- range $name := .certificates }}
      - secret:
          name: {{ printf "%s-%s-tls" $values.name $name }}
          items:
            - {key: ca.crt, path: {{ $name }}/ca.crt}
            - {key: tls.crt, path: {{ $name }}/tls.crt}
            - {key: tls.key, path: {{ $name }}/tls.key}
      {{- end }}
      {{- with .tokens }}
      - secret:
          name: {{ $values.tokens.existingSecret }}
          items:
            {{- range . }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
      {{- with .store }}
      - secret:
          name: {{ $values.redis.existingSecret }}
          items: [{key: {{ . }}, path: redis_url}]
      {{- end }}
{{- end -}}

{{- define "seamflow.dataClaim" -}}
{{ .Values.data.existingClaim | default (printf "%s-data" .Values.name) }}
{{- end -}}

{{/* Spec of a volume's claim: (dict "size" text "storageClass" text "accessModes" list). */}}
{{- define "seamflow.claimSpec" -}}
accessModes: {{ toJson (.accessModes | default (list "ReadWriteOnce")) }}
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end -}}

{{/* A claim that outlives the release: (dict "root" $ "name" name "volume" values). */}}
{{- define "seamflow.claim" -}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{- include "seamflow.meta" (list .root .name) | nindent 2 }}
  annotations: {helm.sh/resource-policy: keep}
spec: {{- include "seamflow.claimSpec" .volume | nindent 2 }}
{{- end -}}

{{/* Host memory of a node's pod: (dict "parameters" "tags" "together" pods-of-a-trainer "servers"). While it is lent,
a trainer keeps 12 bytes a parameter on the host, beside the copy that is published and that of a checkpoint, on all
of its pods together; each rollout server prepares a version of 2 bytes a parameter beside the page cache of its files.
*/}}
{{- define "seamflow.memory" -}}
{{- $bytes := 0.0 -}}
{{- if has "train" .tags }}{{- $bytes = addf $bytes (divf (mulf 26 (float64 .parameters)) .together) -}}{{- end -}}
{{- if has "rollout" .tags }}{{- $bytes = addf $bytes (mulf 4 (float64 .parameters) .servers) -}}{{- end -}}
{{- $gibibytes := add 8 (int64 (ceil (divf $bytes 1073741824))) -}}
request: {{ $gibibytes }}Gi
limit: {{ div (mul 3 $gibibytes) 2 }}Gi
{{- end -}}
