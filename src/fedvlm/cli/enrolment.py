"""Commands by which sites join a federation, renew their keys and leave it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedvlm.cli.deploy import deploy_app

__all__ = ["deploy_app"]  # with these commands
Server = Annotated[Path, typer.Argument(help="DIR/server")]
Site = Annotated[Path, typer.Argument(help="The site's own folder.")]


@deploy_app.command("join-request")
def join_request(
    folder: Site,
    name: Annotated[str | None, typer.Option(help="What the site is to be called.")] = None,
    invitation: Annotated[Path | None, typer.Option(help="The server's invitation.json, as it sent it.")] = None,
) -> None:
    """Make a site's own key, and a request for the server to admit it."""
    from fedvlm.deploy.admission import create_join_request as ask

    _tell_request(ask(folder, invitation, name))


def _tell_request(request: Any) -> None:
    typer.echo(f"send {request.path} to the server; the key stays here")
    typer.echo(f"fingerprint, for the server's people to hear: {request.fingerprint}")


@deploy_app.command()
def admit(
    folder: Server,
    request: Annotated[Path, typer.Argument(help="The request.json that a site sent.")],
    yes: Annotated[bool, typer.Option(help="The fingerprint was compared; do not ask.")] = False,
) -> None:
    """Let a site in, after its people have read the same fingerprint out to you."""
    from fedvlm.deploy.admission import admit_site as sign
    from fedvlm.deploy.admission import read_request
    from fedvlm.deploy.kits import read_server
    from fedvlm.errors import FederationError

    kit = read_server(folder)
    site_request = read_request(kit, request)
    typer.echo(f"{site_request.remark}\nfingerprint: {site_request.fingerprint}")
    if not yes and not typer.confirm("Call the site: do its people read the same?"):
        raise FederationError(
            f"{site_request.site} is not admitted; if the fingerprints differ, somebody has changed the "
            "invitation or the request on its way: send both again by another way"
        )
    typer.echo(f"{site_request.site} is admitted; send it {sign(kit, site_request)}, which holds no secret")


@deploy_app.command()
def accept(
    folder: Site,
    file: Annotated[Path, typer.Argument(help="What the server sent: NAME.json.")],
) -> None:
    """Put the server's certificate into the site's folder; it can be started then."""
    from fedvlm.deploy.admission import accept_certificate as take
    from fedvlm.deploy.membership import describe_validity

    admission = take(folder, file)
    typer.echo(
        f"{admission.site} may join {admission.address}; "
        f"its certificate {describe_validity(admission.days_left, folder)}"
    )
    typer.echo(f"fingerprint: {admission.fingerprint}")


@deploy_app.command()
def renew(folder: Annotated[Path, typer.Argument(help="A server's folder, or a site's.")]) -> None:
    """Renew a server's certificate, or make a site's request for a new key."""
    from fedvlm.deploy.admission import create_join_request as ask
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.standing import renew_server_certificate

    if (folder / "server.toml").exists():
        days = renew_server_certificate(read_server(folder))
        typer.echo(f"the server's certificate lasts {days} more days, from its next start on")
    else:
        _tell_request(ask(folder))


@deploy_app.command()
def revoke(folder: Server, site: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """End a site's key at once, also in a running round."""
    from fedvlm.deploy.admission import revoke_site as end
    from fedvlm.deploy.kits import read_server

    end(read_server(folder), site)
    typer.echo(f"{site} is out from its next message on; its key does not come back")


@deploy_app.command()
def keys(folder: Annotated[Path, typer.Argument(help="A server's folder, or a site's.")]) -> None:
    """Say whose keys there are, their fingerprints, and how many days they last."""
    from fedvlm.deploy.standing import certificate_statuses

    for key_status in certificate_statuses(folder):
        days = "" if key_status.days is None else f"{key_status.days} days left"
        typer.echo(
            "  ".join(word for word in (key_status.name, key_status.fingerprint, days, key_status.remark) if word)
        )


@deploy_app.command()
def withdraw(
    folder: Annotated[Path, typer.Argument(help="At a site its folder; at the server DIR/server.")],
    file: Annotated[Path | None, typer.Argument(help="At the server: what the site sent.")] = None,
    by: Annotated[str, typer.Option(help="At a site: who withdraws it.")] = "",
    record: Annotated[list[Path] | None, typer.Option(help="A run's directory outside DIR/server/runs.")] = None,
) -> None:
    """Take a site out of all later rounds, and out of what is shared where that is a plain sum."""
    if file is None:
        from fedvlm.deploy.withdrawn import withdraw as leave

        path = leave(folder, by)
        typer.echo(f"this site answers no more; send {path} to the server, which takes it out")
        return
    from fedvlm.deploy.forget import apply_withdrawal
    from fedvlm.deploy.kits import read_server

    site, messages = apply_withdrawal(read_server(folder), file, record or [])
    for message in messages:
        typer.echo(str(message))
    typer.echo(f"{site} is out of all later rounds; it comes back by a new key only")


@deploy_app.command()
def join(
    folder: Server,
    run: Annotated[str, typer.Argument(help="A finished run: its name, or its directory.")],
    site: Annotated[str, typer.Argument(help="The site that has come late; it is running.")],
) -> None:
    """Give a late site its classifier: from what is shared and its own rows, without the others."""
    from fedvlm.deploy.events import format_percent
    from fedvlm.deploy.kits import read_server
    from fedvlm.deploy.runs import join_late_site as bring

    scores = bring(read_server(folder), run, site, lambda text: typer.echo(text, err=True))
    for name, score in scores.items():
        rows = score["test_rows"]
        accuracy_text = f": {format_percent(score['test_hits'] / rows)} of its {rows} test rows" if rows else ""
        typer.echo(f"{site} has its classifier of {name}{accuracy_text}")
