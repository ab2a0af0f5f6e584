"""A federation without sites, and sites that ask to join it, without processes."""

from fedvlm.deploy import membership
from fedvlm.deploy.admission import accept, admit, join_request, read_request
from fedvlm.deploy.kits import INVITATION, init, read_server
from fedvlm.deploy.membership import issue, member, place

ADDRESS = "127.0.0.1:8443"


class Joining:
    def __init__(self, folder):
        self.folder = folder
        [self.server] = init(folder / "fed", [], "127.0.0.1", 8443)

    @property
    def kit(self):
        return read_server(self.server)

    def asks(self, name, folder=None):
        """A site's request, in a folder of its own."""
        place = self.folder / (folder or name)
        return join_request(place, self.server / INVITATION, name)

    def admits(self, request):
        return admit(self.kit, read_request(self.kit, request.path))

    def joins(self, name):
        """All three steps."""
        accept(self.folder / name, self.admits(self.asks(name)))
        return self.folder / name

    def expires(self, name):
        """A certificate of yesterday for the key that the site has, at both places."""
        key = member(self.server, name).key.encode()
        issue(self.server, ADDRESS, name, key, days=-1)
        (self.folder / name / membership.NAME).write_bytes(place(self.server, name).read_bytes())
