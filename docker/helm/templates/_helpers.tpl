{{- define "elasticflow.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "elasticflow.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "elasticflow.selector" -}}
app.kubernetes.io/name: elasticflow
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: service
{{- end -}}

{{- define "elasticflow.labels" -}}
app.kubernetes.io/name: elasticflow
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "elasticflow.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "elasticflow.containerSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "elasticflow.sharedClaim" -}}
{{ default (printf "%s-shared" (include "elasticflow.fullname" .)) .Values.sharedStorage.existingClaim }}
{{- end -}}

{{/* How every process finds the token of the Ray cluster. */}}
{{- define "elasticflow.rayToken" -}}
- { name: RAY_AUTH_MODE, value: token }
- { name: RAY_AUTH_TOKEN_PATH, value: /run/secrets/ray/token }
- { name: RAY_USAGE_STATS_ENABLED, value: "0" }
{{- end -}}

{{/* The environment of Ray's own pods. What is to be drained is drained by the hook of the workers' pods. */}}
{{- define "elasticflow.rayEnvironment" -}}
- { name: HOME, value: /var/lib/elasticflow-home }
{{ include "elasticflow.rayToken" . }}
- { name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0" }
{{- end -}}

{{/* What all pods of Ray have. */}}
{{- define "elasticflow.rayPod" -}}
serviceAccountName: {{ include "elasticflow.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
# Supervisors and agents outlive the process that started them: somebody must reap them.
shareProcessNamespace: true
securityContext: {{- include "elasticflow.podSecurity" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "elasticflow.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* How many services there are. */}}
{{- define "elasticflow.replicas" -}}
{{- $may := and (eq .Values.engine "ray") (ne .Values.secrets.database "") -}}
{{- $replicas := int (default (ternary 2 1 $may) .Values.service.replicas) -}}
{{- if gt $replicas 1 -}}
{{- $sorry := printf "%d replicas of the service cannot run" $replicas -}}
{{- if eq .Values.engine "local" -}}
{{- fail (printf "%s with the engine local: another pod has no access to the GPUs of the first. Set service.replicas to 1" $sorry) -}}
{{- else if not .Values.secrets.database -}}
{{- fail (printf "%s on SQLite: they share a PostgreSQL. Name the secret with its URL in secrets.database, or set service.replicas to 1" $sorry) -}}
{{- else if not .Values.secrets.keys -}}
{{- fail (printf "%s without the same keys for the secrets of jobs: make a secret with the key `keys`, as docs/how-to/replicas.md says, and name it in secrets.keys, or set service.replicas to 1" $sorry) -}}
{{- end -}}
{{- end -}}
{{ $replicas }}
{{- end -}}

{{/*
Refuse to replace a service that still keeps in its own volume what replicas need from the database: one of an earlier
release, or one that has not started yet with this release. `helm template` cannot see what runs, and lets it pass.
*/}}
{{- define "elasticflow.upgrade" -}}
{{- if ne (include "elasticflow.replicas" .) "1" -}}
{{- $name := include "elasticflow.fullname" . -}}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace $name -}}
{{- $then := "Then upgrade again without it" -}}
{{- if not (dig "metadata" "annotations" "elasticflow/elects-a-leader" "" .) -}}
{{- fail (printf "%s is of an earlier release, which shares its database with nobody: upgrade once with --set service.replicas=1, so that what is in its volume gets into the database. %s (docs/how-to/replicas.md)" $name $then) -}}
{{- else if or (lt (int (dig "status" "readyReplicas" 0 .)) 1) (ne (dig "status" "currentRevision" "" .) (dig "status" "updateRevision" "" .)) -}}
{{- fail (printf "%s is not ready, and what is in its volume may not be in the database yet: wait until it is (kubectl rollout status statefulset/%s), and upgrade again" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
