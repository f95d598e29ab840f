"""The API server of scripts/cluster, spoken to directly: thousands of calls would cost minutes with kubectl."""
import http.client, json, re, ssl, time

GROUP = "/apis/longhorn.io/v1beta2/namespaces/longhorn-system"
CORE = "/api/v1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/longhorn-system"


class Refused(Exception):
    """The API server said no; `status` is HTTP's."""

    def __init__(self, status, text):
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


class Kube:
    """As the administrator whom scripts/cluster made; one connection, made anew when it broke."""

    def __init__(self, home):
        config = open(f"{home}/admin.kubeconfig").read()
        self.host, self.port = re.search(r"https://([^:]+):(\d+)", config).groups()
        self.tls = ssl.create_default_context(cafile=f"{home}/pki/ca.crt")
        self.tls.load_cert_chain(f"{home}/pki/admin.crt", f"{home}/pki/admin.key")
        self.connection = None

    def call(self, method, path, body=None, content="application/json"):
        """The answer, or `Refused`, or an OSError of a server that does not answer."""
        if self.connection is None:
            self.connection = http.client.HTTPSConnection(self.host, self.port, timeout=10, context=self.tls)
        try:
            data = None if body is None else json.dumps(body)
            self.connection.request(method, path, data, {"Content-Type": content})
            answer = self.connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            self.connection = None
            raise OSError(str(error)) from error
        if answer.status == 429:
            # It asks for patience, as while it reads its storage.
            time.sleep(1)
            return self.call(method, path, body, content)
        if answer.status >= 300:
            raise Refused(answer.status, text.decode(errors="replace"))
        return text

    def get(self, kind, name, group=GROUP):
        """An object, or None."""
        try:
            return json.loads(self.call("GET", f"{group}/{kind}/{name}"))
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def list(self, kind, group=GROUP):
        return json.loads(self.call("GET", f"{group}/{kind}"))["items"]

    def create(self, kind, name, content, group=GROUP, version="longhorn.io/v1beta2", labels=None):
        singular = {"volumes": "Volume", "nodes": "Node", "settings": "Setting"}[kind]
        metadata = {"name": name, "labels": labels or {}}
        self.call("POST", f"{group}/{kind}", {"apiVersion": version, "kind": singular, "metadata": metadata, **content})

    def patch(self, kind, name, change, group=GROUP):
        self.call("PATCH", f"{group}/{kind}/{name}", change, "application/merge-patch+json")

    def delete(self, kind, name, group=GROUP):
        self.call("DELETE", f"{group}/{kind}/{name}")

    def attach(self, volume, node):
        """Asks for a volume on a node as the CSI driver does; None: nowhere."""
        ticket = node and {"id": "t", "type": "csi-attacher", "nodeID": node}
        self.patch("volumeattachments", volume, {"spec": {"attachmentTickets": {"t": ticket}}})
