{{- define "pd.fullname" -}}
{{- $name := .Release.Name -}}
{{- /* Longer names would not leave enough for what controllers add to them in labels. */ -}}
{{- if gt (len $name) 36 }}{{ $name = printf "%s-%s" (trunc 29 $name) (sha256sum $name | trunc 6) }}{{ end -}}
{{- if contains "pd" $name }}{{ $name }}{{ else }}{{ $name }}-pd{{ end -}}
{{- end }}

{{- define "pd.selector" -}}
app.kubernetes.io/name: pd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pd.labels" -}}
{{ include "pd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "pd.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "pd.clusterKeySecret" -}}
{{- $key := .Values.clusterKey -}}
{{- if and (not $key.existingSecret) (not $key.value) -}}
{{- fail "clusterKey: nodes need one beyond loopback; give clusterKey.existingSecret or clusterKey.value (openssl rand -hex 32)" -}}
{{- end -}}
{{- $key.existingSecret | default (printf "%s-cluster-key" (include "pd.fullname" .)) -}}
{{- end }}

{{- define "pd.hasApiKeys" -}}
{{- $keys := .Values.apiKeys -}}
{{- if or $keys.existingSecret $keys.value }}yes
{{- else if not $keys.allowEverybody -}}
{{- fail "apiKeys: give apiKeys.existingSecret or apiKeys.value, or apiKeys.allowEverybody: true if everybody who reaches the proxy may use it" -}}
{{- end -}}
{{- end }}

{{- define "pd.apiKeysSecret" -}}
{{- .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "pd.fullname" .)) -}}
{{- end }}

{{- /* A scalar as it was written: Helm reads whole numbers as floats, which print as 1e+06. */ -}}
{{- define "pd.scalar" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{- /* Flags as arguments: true is a switch, false none, and a list repeats the flag. */ -}}
{{- define "pd.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- end }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name (include "pd.scalar" .) | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $name (include "pd.scalar" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Placement of a pod. Takes values of a component, and its labels for the spread. */ -}}
{{- define "pd.placement" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.spreadOver }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pd.selector" $.root | nindent 8 }}
        app.kubernetes.io/component: {{ $.component }}
{{- end }}
{{- end }}

{{- define "pd.podMetadata" -}}
labels:
  {{- include "pd.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- if ne .component "proxy" }}
  pd/node: "true"
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "pd.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001 # so that the process may read its Secrets
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pd.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Mounts and volumes that all processes have. */ -}}
{{- define "pd.mounts" -}}
- {name: cluster-key, mountPath: /etc/pd/cluster-key, readOnly: true}
- {name: scratch, mountPath: /tmp}
{{- if .Values.model.volume }}
- {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "pd.volumes" -}}
- name: cluster-key
  secret:
    secretName: {{ include "pd.clusterKeySecret" . }}
    defaultMode: 0400
    items:
      - {key: {{ .Values.clusterKey.key }}, path: cluster.key}
{{- with .Values.model.volume }}
{{- if not (hasPrefix (printf "%s/" $.Values.model.mountPath) $.Values.model.path) }}
{{- fail (printf "model.path %s is not in model.mountPath %s, where model.volume is mounted" $.Values.model.path $.Values.model.mountPath) }}
{{- end }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "pd.discover" -}}
{{- if eq .Values.discovery.kind "dns" -}}
dns:{{ include "pd.fullname" . }}-nodes.{{ .Release.Namespace }}.svc.{{ .Values.discovery.clusterDomain }}.:30000
{{- else -}}
kubernetes:app.kubernetes.io/name=pd,app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=nodes
{{- end -}}
{{- end }}

{{- /* Scaling follows requests in these queues of a role. */ -}}
{{- define "pd.queues" -}}
{{- if eq . "prefill" }}waiting{{ else }}preallocation|running|retracted|transfer|waiting{{ end -}}
{{- end }}

{{- define "pd.scaleTarget" -}}
{{- if .values.group.enabled -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "pd.fullname" .root }}-{{ .component }}
{{- end }}
