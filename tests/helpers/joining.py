"""A federation without sites, and sites that ask to join it, without processes."""

from fedvlm.deploy.identity import certificates
from fedvlm.deploy.identity.certificates import certificate_path, current_certificate, issue_certificate
from fedvlm.deploy.identity.enrolment import accept_certificate, admit_site, create_join_request, read_request
from fedvlm.deploy.kits import INVITATION_FILE, create_kits, read_server

ADDRESS = "127.0.0.1:8443"


class Joining:
    def __init__(self, folder):
        self.folder = folder
        [self.server] = create_kits(folder / "fed", [], "127.0.0.1", 8443)

    @property
    def kit(self):
        return read_server(self.server)

    def request_join(self, name, folder=None):
        """A site's request, in a folder of its own."""
        place = self.folder / (folder or name)
        return create_join_request(place, self.server / INVITATION_FILE, name)

    def admits(self, request):
        return admit_site(self.kit, read_request(self.kit, request.path))

    def joins(self, name):
        """All three steps."""
        accept_certificate(self.folder / name, self.admits(self.request_join(name)))
        return self.folder / name

    def expires(self, name):
        """A certificate of yesterday for the key that the site has, at both places."""
        key = current_certificate(self.server, name).key.encode()
        issue_certificate(self.server, ADDRESS, name, key, days=-1)
        (self.folder / name / certificates.CERTIFICATE_FILE).write_bytes(
            certificate_path(self.server, name).read_bytes()
        )
