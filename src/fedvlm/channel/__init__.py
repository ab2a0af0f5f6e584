"""What happens to an upload on its way to the server."""

from fedvlm.channel.settings import Channel as Channel
from fedvlm.channel.validation import validate as validate
