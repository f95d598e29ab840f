{{/* The name of an image: (list . .Values.image.longhorn) */}}
{{- define "longhorn.image" -}}
{{- $chart := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $chart.Values.global.imageRegistry | default $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository }}:{{ $image.tag | default $chart.Chart.AppVersion }}
{{- end }}

{{/* Where volumes lie on a node. */}}
{{- define "longhorn.dataPath" -}}
{{- .Values.defaultSettings.defaultDataPath | default "/var/lib/longhorn" | trimSuffix "/" -}}
{{- end }}

{{/* The kubelet's own directory. Longhorn's values name none (~), which takes away the one that values.yaml has. */}}
{{- define "longhorn.kubeletRootDir" -}}
{{- .Values.csi.kubeletRootDir | default "/var/lib/kubelet" | trimSuffix "/" -}}
{{- end }}

{{/* The secrets for pulling images, given by name or as objects, as JSON. */}}
{{- define "longhorn.imagePullSecrets" -}}
{{- $all := list -}}
{{- range .Values.global.imagePullSecrets -}}
{{- $all = append $all (kindIs "string" . | ternary (dict "name" .) .) -}}
{{- end -}}
{{- toJson $all -}}
{{- end }}

{{/* The settings that were given, under their own names and as text, as JSON. Numbers of a values file are floating point. */}}
{{- define "longhorn.defaultSettings" -}}
{{- $all := dict -}}
{{- range $name, $value := .Values.defaultSettings -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $all (kebabcase $name) (kindIs "float64" $value | ternary (int64 $value) $value | toString) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $all "default-data-path" (include "longhorn.dataPath" .) -}}
{{- if eq (get $all "default-data-path") "/var/lib/longhorn" -}}
{{- $_ := unset $all "default-data-path" -}}
{{- end -}}
{{- toJson $all -}}
{{- end }}
