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
