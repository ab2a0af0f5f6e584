"""Refuses an upload that is not what the method sends, before it reaches the aggregate."""

from collections.abc import Collection

from fedvlm.core import Tensors
from fedvlm.errors import FederationError


def validate(upload: Tensors, local: Collection[str], where: str) -> None:
    """`where` names method, client and round."""
    for key, value in upload.items():
        if key in local:
            raise FederationError(f"{where}: the upload holds {key!r}, which is local; remove it")
        if value.is_floating_point() and not value.isfinite().all():
            raise FederationError(
                f"{where}: {int((~value.isfinite()).sum())} of {value.numel()} numbers of {key!r} "
                "are not finite; lower the rate, or look at this client's rows"
            )
