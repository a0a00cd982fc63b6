{{/* The configuration file of a service: (list $ name). */}}
{{- define "seamflow.serviceConfig" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}
{{- $values := $root.Values -}}{{- $service := get $values.services $name -}}
{{- $given := dict "host" $values.listenAddress "port" $service.port "admin_port" 9100 -}}
{{- $_ := set $given "operator_token_file" "/secrets/operator_token" -}}
{{- range $used := $service.uses -}}
{{- $_ := set $given ($used | replace "-" "_") (include "seamflow.address" (list $root $used)) -}}
{{- end -}}
{{- if not (has $name (list "trajectory-manager" "scheduler" "weights" "tool-loop")) -}}
{{- $_ := set $given "run_id" $values.run.settings.run_id -}}
{{- end -}}
{{- if $service.hasStore }}{{- $_ := set $given "redis_url_file" "/secrets/redis_url" -}}{{- end -}}
{{- if $service.servesAgents }}{{- $_ := set $given "agent_token_file" "/secrets/agent_token" -}}{{- end -}}
{{- if $service.httpPort }}{{- $_ := set $given "http_port" $service.httpPort -}}{{- end -}}
{{- if has $name (list "rollout-gateway" "evaluator" "console") -}}
{{- $_ := set $given "model" $values.model -}}
{{- end -}}
{{- if and (has $name (list "dataloader" "console")) $values.services.evaluator.enabled -}}
{{- $_ := set $given "evaluator" (include "seamflow.address" (list $root "evaluator")) -}}
{{- end -}}
{{- if eq $name "trajectory-manager" -}}
{{- $_ := set $given "durability" $values.run.settings.durability -}}
{{- else if eq $name "rollout-gateway" -}}
{{- $_ := set $given "credential_secret_file" "/secrets/credential_secret" -}}
{{- if $values.services.ranker.enabled -}}
{{- $_ := set $given "lengths" "ranker" -}}
{{- $_ := set $given "ranker" (include "seamflow.address" (list $root "ranker")) -}}
{{- end -}}
{{- else if eq $name "http-gateway" -}}
{{- $_ := set $given "public_url" (printf "https://%s-http-gateway:%v" $values.name $service.httpPort) -}}
{{- else if eq $name "environments" -}}
{{- $_ := set $given "environment" (include "seamflow.address" (list $root "tool-loop")) -}}
{{- else if eq $name "console" -}}
{{- $_ := set $given "access_token_file" "/secrets/console_access_token" -}}
{{- end -}}
{{- $table := $name | replace "-" "_" -}}
{{- include "seamflow.toml" (dict "certificate" $name "table" $table "given" $given "settings" $service.settings) -}}
{{- end -}}

{{/* The configuration file of a node pool, with a table for each process of its pods: (list $ name). */}}
{{- define "seamflow.poolConfig" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}
{{- $values := $root.Values -}}{{- $pool := get $values.nodePools $name -}}
{{- $gpus := int $pool.gpus -}}
{{- $all := dict "host" $values.listenAddress "operator_token_file" "/secrets/operator_token" -}}
{{- $_ := set $all "run_id" $values.run.settings.run_id -}}
{{- range $used := list "trajectory-manager" "weights" "scheduler" -}}
{{- $_ := set $all ($used | replace "-" "_") (include "seamflow.address" (list $root $used)) -}}
{{- end -}}
{{- $agent := dict "port" 50057 "admin_port" 9100 "state_folder" "/state" -}}
{{- $agent = merge $agent (omit $all "trajectory_manager" "weights") -}}
{{- $_ := set $agent "capability_tags" $pool.tags -}}
{{- $_ := set $agent "gpus" (until $gpus) -}}
{{- with $pool.kind }}{{- $_ := set $agent "kind" . -}}{{- end -}}
{{- $of := dict "certificate" (printf "%s-node-agent" $name) "table" "node_agent" "given" $agent -}}
{{- include "seamflow.toml" (set $of "settings" $values.nodeAgent.settings) }}
{{ $server := merge (dict "port" 50056 "admin_port" 9101 "model" $values.model "cache_folder" "/cache") -}}
{{- $server = merge $server (omit $all "trajectory_manager" "scheduler") -}}
{{- $_ := set $server "lends_device" (gt (len $pool.tags) 1) -}}
{{- $_ := set $server "num_gpus" (div $gpus (int (default 1 $pool.servers))) -}}
{{- with $pool.zone }}{{- $_ := set $server "zone" . -}}{{- end -}}
{{- $of := dict "certificate" (printf "%s-rollout-server" $name) "table" "rollout_server" "given" $server -}}
{{- include "seamflow.toml" (set $of "settings" $values.rolloutServer.settings) }}
{{ if has "train" $pool.tags -}}
{{- $trainer := merge (dict "port" 50054 "admin_port" 9102 "model" $values.model "resume" true) $all -}}
{{- if $values.services.evaluator.enabled }}{{- $_ := set $trainer "end_run" false -}}{{- end -}}
{{- if gt (int (default 1 $pool.trainerPods)) 1 -}}
{{- $_ := set $trainer "gang" (dict "nodes" (int $pool.trainerPods)) -}}
{{- end -}}
{{- if $gpus }}{{- $_ := merge $trainer (dict "device" "cuda" "dtype" "bfloat16") -}}{{- end -}}
{{- $of := dict "certificate" (printf "%s-trainer" $name) "table" "trainer" "given" $trainer -}}
{{- include "seamflow.toml" (set $of "settings" $values.trainer.settings) }}
{{- end -}}
{{- end -}}

{{/* The configuration file of the job that creates the run. */}}
{{- define "seamflow.runConfig" -}}
{{- $given := dict "trajectory_manager" (include "seamflow.address" (list . "trajectory-manager")) -}}
{{- $of := dict "certificate" "create-run" "table" "run" "given" $given -}}
{{- include "seamflow.toml" (set $of "settings" .Values.run.settings) -}}
{{- end -}}
