{{- define "headgate.name" -}}
{{- if contains "headgate" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-headgate" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "headgate.selector" -}}
app.kubernetes.io/name: headgate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headgate.redisSelector" -}}
app.kubernetes.io/name: headgate-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headgate.labels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Whether the Redis of this chart is used: not beside a store of yours. */ -}}
{{- define "headgate.ownRedis" -}}
{{- if and .Values.redis.enabled (not .Values.store.url) (not .Values.store.existingSecret) }}yes{{ end }}
{{- end }}

{{- define "headgate.storeSecret" -}}
{{- .Values.store.existingSecret | default (include "headgate.name" .) }}
{{- end }}

{{- define "headgate.tokensSecret" -}}
{{- .Values.tokens.existingSecret | default (include "headgate.name" .) }}
{{- end }}

{{- define "headgate.store" -}}
{{- if .Values.store.url }}{{ .Values.store.url }}
{{- else if .Values.redis.enabled -}}
redis://:{{ required "redis.password is needed: --set redis.password=\"$(openssl rand -hex 24)\"" .Values.redis.password }}@{{ include "headgate.name" . }}-redis:6379/0
{{- else }}{{ fail "no store: set store.url, store.existingSecret or redis.enabled" }}{{ end }}
{{- end }}
