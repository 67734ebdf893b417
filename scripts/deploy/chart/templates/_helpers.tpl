{{- define "vnext.labels" -}}
app.kubernetes.io/name: vnext
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "vnext.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 30 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "vnext.container" -}}
image: {{ required "name the image: --set image=IMAGE" .Values.image | quote }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
ports: [{name: http, containerPort: 8000}]
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
livenessProbe: {httpGet: {path: /live, port: http}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 1}
# Those who route by the Service learn that the pod stops before it refuses them.
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
{{- end -}}

{{- define "vnext.secrets" -}}
{{- range $name, $key := .names }}
- {name: {{ $name }}, valueFrom: {secretKeyRef: {name: {{ $.secret | quote }}, key: {{ $key }}, optional: true}}}
{{- end }}
{{- end -}}
