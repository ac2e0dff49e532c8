{{- define "horovod.labels" -}}
app.kubernetes.io/name: horovod
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "horovod.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "horovod.coordinator" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}-coordinator
{{- end }}

{{- define "horovod.agent" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}-agent
{{- end }}

{{/* The addresses of all coordinators, as --coordinator and HOROVOD_COORDINATOR take them. */}}
{{- define "horovod.addresses" -}}
{{- $name := include "horovod.coordinator" . -}}
{{- range $index := until (int .Values.coordinator.replicas) -}}
{{- if $index }},{{ end }}{{ $name }}-{{ $index }}.{{ $name }}:29400
{{- end -}}
{{- end }}

{{/* The names that the coordinators' certificate must have. */}}
{{- define "horovod.hosts" -}}
{{- $name := include "horovod.coordinator" . -}}
{{- range $index := until (int .Values.coordinator.replicas) -}}
{{- if $index }},{{ end }}{{ $name }}-{{ $index }}.{{ $name }}
{{- end -}}
{{- end }}

{{- define "horovod.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "horovod.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch # else the group may write to the store, which the coordinator refuses
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "horovod.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* What a launcher, an agent or a rank needs to reach the coordinators. */}}
{{- define "horovod.memberEnvironment" -}}
- {name: HOROVOD_TOKEN_FILE, value: {{ printf "/secrets/token/%s" .Values.token.key }}}
{{- if .Values.tls.enabled }}
- {name: HOROVOD_TLS_CA, value: /secrets/tls/ca.pem}
{{- if .Values.tls.clientCertificates }}
- {name: HOROVOD_TLS_CERT, value: /secrets/tls/client.pem}
- {name: HOROVOD_TLS_KEY, value: /secrets/tls/client.key}
{{- end }}
{{- end }}
{{- end }}

{{- define "horovod.memberMounts" -}}
- {name: token, mountPath: /secrets/token, readOnly: true}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /secrets/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "horovod.memberVolumes" -}}
- name: token
  secret: {secretName: {{ .Values.token.secret }}, defaultMode: 0440}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ .Values.tls.memberSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}
