"""Whether an aggregate that says a sum of the uploads will do gives the same from that sum."""

from fedvlm import tensors
from fedvlm.channel import Channel
from fedvlm.channel.uploads import UploadPipeline
from fedvlm.core import upload_sum
from fedvlm.engines.client import World, make_client


def sum_gap(world: World) -> float:
    """How far it is from that, in one round; 0 if the method does not say so."""
    method = world.method
    if upload_sum(method) is None:
        return 0.0
    shared, local = method.init(world.frozen)
    sent = {id: method.send(shared, id) for id in sorted(world.members)}
    uploads = {id: method.update(world.frozen, sent[id], local, make_client(world, id, 0))[0] for id in sent}
    ragged = method.traits.ragged_uploads  # what no sum is said of
    if not any(uploads.values()) or any(ragged & upload.keys() for upload in uploads.values()):
        return 0.0
    rows = {id: len(world.members[id].train) for id in sent}
    results = []
    for channel in (Channel(), Channel(secure=True)):
        decoded = UploadPipeline(channel, method, list(local), 0).run(0, uploads, sent, rows, {}, (), str)
        results.append(method.aggregate(shared, decoded.uploads, decoded.weights, decoded.ids))
    return tensors.max_relative_difference(*results)
