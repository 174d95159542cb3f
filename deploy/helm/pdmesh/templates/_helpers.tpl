{{- define "pdmesh.name" -}}
{{- if contains "pdmesh" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-pdmesh" (.Release.Name | trunc 45 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "pdmesh.selector" -}}
app.kubernetes.io/name: pdmesh
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdmesh.labels" -}}
{{ include "pdmesh.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "pdmesh.meshSecret" -}}
{{ .Values.meshSecret.existing | default (printf "%s-secret" (include "pdmesh.name" .)) }}
{{- end }}

{{/* Arguments: root, role. A pool of workers, whose SSD tier is a claim, is a StatefulSet. */}}
{{- define "pdmesh.kind" -}}
{{- $pool := get .root.Values .role }}
{{- if dig "cache" "ssd" "claim" false $pool }}StatefulSet{{ else }}Deployment{{ end }}
{{- end }}

{{- define "pdmesh.image" -}}
{{- $values := .root.Values }}
{{- (get $values .role).image | default (printf "%s-%s:%s" $values.image.prefix .role ($values.image.tag | default .root.Chart.AppVersion)) }}
{{- end }}

{{/* Text of a setting: Helm reads large whole numbers as floats, and writes those with an exponent. */}}
{{- define "pdmesh.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* Variables of all three services; arguments: root, role. Kubernetes sets PDMESH_PORT by itself for a Service named pdmesh,
     unless enableServiceLinks is off. */}}
{{- define "pdmesh.env" -}}
{{- $values := .root.Values }}
{{- $own := get $values .role -}}
- {name: PDMESH_MODEL, value: {{ if $values.model.volume }}{{ printf "/model/%s" $values.model.folder | trimSuffix "/" | quote }}{{ else }}demo{{ end }}}
- {name: PDMESH_HOST, value: {{ $values.listen | quote }}}
- {name: PDMESH_LOG_FORMAT, value: json}
- {name: PDMESH_MESH_SECRET_FILE, value: /secrets/mesh/mesh-secret}
- {name: PDMESH_DRAIN_S, value: {{ $own.drainSeconds | quote }}}
{{- if $values.meshTls.secret }}
- {name: PDMESH_MESH_TLS_CERT, value: /secrets/mesh-tls/tls.crt}
- {name: PDMESH_MESH_TLS_KEY, value: /secrets/mesh-tls/tls.key}
- {name: PDMESH_MESH_TLS_CA, value: /secrets/mesh-tls/ca.crt}
{{- end }}
{{- /* Not merge: of two it takes the other's where its own is false or 0. */}}
{{- range $name := concat (keys $own.settings) (keys $values.settings) | uniq | sortAlpha }}
{{- $value := get (hasKey $own.settings $name | ternary $own.settings $values.settings) $name }}
- {name: PDMESH_{{ $name | upper }}, value: {{ include "pdmesh.text" $value | quote }}}
{{- end }}
{{- with $own.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What is of every pod: who it runs as, what it may write, where it may run. */}}
{{- define "pdmesh.pod" -}}
{{- $values := .root.Values }}
{{- $own := get $values .role -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "pdmesh.selector" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .role }}
{{- with $own.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "pdmesh.locked" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "pdmesh.volumes" -}}
{{- $values := .root.Values -}}
- {name: tmp, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
- {name: mesh-secret, secret: {secretName: {{ include "pdmesh.meshSecret" .root }}, defaultMode: 0440}}
{{- with $values.meshTls.secret }}
- {name: mesh-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- with $values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (get $values .role).volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "pdmesh.mounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
- {name: mesh-secret, mountPath: /secrets/mesh, readOnly: true}
{{- if $values.meshTls.secret }}
- {name: mesh-tls, mountPath: /secrets/mesh-tls, readOnly: true}
{{- end }}
{{- if $values.model.volume }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- with (get $values .role).volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* All ask the listener for scrapes, which has neither key nor TLS. Argument: seconds that a start may take. */}}
{{- define "pdmesh.probes" -}}
startupProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ divf . 5 | ceil }}
readinessProbe:
  httpGet: {path: /ready, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* What the schema cannot say. */}}
{{- define "pdmesh.check" -}}
{{- range $role := list "prefill" "decode" }}
  {{- $ssd := (get $.Values $role).cache.ssd }}
  {{- if and $ssd.claim $ssd.volume }}{{ fail (printf "%s.cache.ssd has both claim and volume: keep one of them." $role) }}{{ end }}
  {{- if and $ssd.size (not (or $ssd.claim $ssd.volume)) }}{{ fail (printf "%s.cache.ssd.size is of a disk: say which with %s.cache.ssd.volume or claim." $role $role) }}{{ end }}
{{- end }}
{{- range $role := list "gateway" "prefill" "decode" }}
  {{- $scale := (get $.Values $role).autoscaling }}
  {{- if gt (int $scale.min) (int $scale.max) }}{{ fail (printf "%s.autoscaling.min is %v, more than max, which is %v." $role $scale.min $scale.max) }}{{ end }}
  {{- if and (eq $scale.kind "keda") (not $.Values.autoscaling.prometheus) }}{{ fail (printf "%s.autoscaling.kind is keda, which asks Prometheus: say where it is with autoscaling.prometheus, as http://prometheus.monitoring:9090." $role) }}{{ end }}
{{- end }}
{{- if and .Values.gateway.tls.clientCa (not .Values.gateway.tls.secret) }}{{ fail "gateway.tls.clientCa needs gateway.tls.secret: without TLS nobody shows a certificate." }}{{ end }}
{{- if and .Values.model.folder (not .Values.model.volume) }}{{ fail "model.folder is a folder in model.volume: say where the model is, as model.volume.persistentVolumeClaim.claimName." }}{{ end }}
{{- end }}
